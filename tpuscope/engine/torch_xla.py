"""The XLA runtime: is it there, which cores has it, where a step ends, what did it count.

Nothing here imports torch_xla before a function is called, so that the package works where it is
not installed.
"""

import contextlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import versions
from ..timeouts import call_with_timeout
from . import _private, hardware, metrics
from ._private import XlaUnavailable
from .hardware import VIRTUAL_CORES
from .metrics import Counters

# How chips lie on a host's board, by their number: x, y, z of Google's topology variables.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def installed() -> bool:
    """Whether torch_xla is installed."""
    return importlib.util.find_spec("torch_xla") is not None


def require_matching_versions() -> None:
    """The gate before the first import of torch_xla.

    Raises:
        XlaUnavailable: torch_xla is missing, or belongs to another torch.
    """
    if not installed():
        where = "" if platform.system() == "Linux" else f" (it has no {platform.system()} build)"
        raise XlaUnavailable(
            f"torch_xla is not installed{where}; on Linux: {versions.install_torch_xla()}, or "
            "choose the device cuda or cpu"
        )
    fault = hardware.version_fault(torch.__version__, metadata.version("torch_xla"))
    if fault:
        raise XlaUnavailable(fault)


def tpu_chips() -> int:
    """TPU chips of this machine, counted on the PCI bus without opening them."""
    if not hardware.tpu_nodes() or not installed():
        return 0
    require_matching_versions()
    return len(hardware.tpu_pci_ids())


def tpu_cores() -> int:
    """Cores (XLA devices) of this machine's TPU: see ``hardware.GENERATIONS``."""
    return tpu_chips() * _cores_per_chip()


def tpu_hosts() -> int:
    """Machines of the TPU slice that this one belongs to; 1 where nobody says otherwise."""
    names = os.environ.get("TPU_WORKER_HOSTNAMES")
    if names:
        return len(names.split(","))

    # It asks the cloud's metadata service without a time limit, and Kaggle may have none; or there
    # is one that knows no TPU.
    with contextlib.suppress(Exception):
        return call_with_timeout(5, _private.tpu_workers)
    return 1


def _cores_per_chip() -> int:
    return max((hardware.GENERATIONS[chip].cores for chip in hardware.tpu_pci_ids()), default=1)


def requested_platform() -> str | None:
    """What ``PJRT_DEVICE`` asks for, in capitals (``"TPU"``, ``"CPU"``), or None."""
    return os.environ.get("PJRT_DEVICE", "").upper() or None


def is_open() -> bool:
    """Whether this process has opened its XLA devices; their number is settled then."""
    if "torch_xla" not in sys.modules:
        return False
    return _private.is_open()


def select_platform(
    name: str, cores: int = 1, processes: int = 1, tpu_flags: Mapping[str, str] | None = None
) -> None:
    """Choose platform and cores for this process; only before the devices are opened.

    Args:
        name: ``"TPU"`` or ``"CPU"``.
        cores: XLA devices of this machine that will be used, one of
            :func:`possible_cores`.
        processes: how many processes share them: 1 (SPMD), or one a chip.
        tpu_flags: what tunes the TPU's compiler for this program, by the variable that holds it
            (``XLA_FLAGS``, ``LIBTPU_INIT_ARGS``); what the user has set comes first.
    """
    require_matching_versions()
    os.environ["PJRT_DEVICE"] = name
    if cores > 1 and processes == 1:
        # Every SPMD compilation prints that XLA's developers will replace its partitioner.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if name == "CPU":
        os.environ["CPU_NUM_DEVICES"] = str(cores // processes)
        return
    forget_stale_variables()
    os.environ.update(merge_flags(os.environ, tpu_flags or {}))
    if 1 < cores < tpu_cores():
        chips = cores // _cores_per_chip()
        if processes == 1:  # all chosen chips in one process
            os.environ["TPU_VISIBLE_CHIPS"] = ",".join(map(str, range(chips)))
            os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _BOUNDS[chips]
            os.environ["TPU_PROCESS_BOUNDS"] = _BOUNDS[1]
        else:  # torch_xla.launch starts as many processes as these bounds hold
            os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _BOUNDS[1]
            os.environ["TPU_PROCESS_BOUNDS"] = _BOUNDS[chips]


def merge_flags(environ: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the flags' variables: what ``environ`` has comes first.

    Args:
        environ: variables by name.
        flags: one compiler flag (``--name=value``) for each variable.
    """
    merged = {}
    for variable, flag in flags.items():
        present = environ.get(variable, "")
        already_set = flag.partition("=")[0] in present
        merged[variable] = present if already_set else f"{present} {flag}".strip()
    return merged


def possible_cores(platform: str) -> list[int]:
    """How many cores of this machine one training can take.

    Any number of virtual ones; of a TPU's chips 1, 2, 4 or 8, because what is used must be a
    rectangle of the board.
    """
    if platform == "CPU":
        return list(range(1, VIRTUAL_CORES + 1))
    chips, each = tpu_chips(), _cores_per_chip()
    return sorted({1, *(n * each for n in _BOUNDS if n <= chips), chips * each})


def forget_stale_variables() -> list[str]:
    """Remove :func:`machine.stale_variables` from this process's environment; their names."""
    stale = hardware.stale_variables(os.environ)
    for name in stale:
        text = f"removed {name}={os.environ.pop(name)}, which breaks TPUs of one machine"
        print(text, file=sys.stderr)  # standard output may carry JSON
    return stale


def device() -> torch.device:
    """The XLA device of this process; opens the runtime on first use.

    Open it before the first backward pass of the process, on whatever device that is: autograd
    counts the devices then, and a backward pass on one that came later ends in an internal
    assertion about ``device_ready_queues_`` (seen with torch_xla 2.9.0).
    """
    import torch_xla

    _private.check()
    return torch_xla.device()


def describe() -> str:
    """For people: the platform and how many of its cores compute: ``XLA on TPU, 1 of 8 cores``."""
    import torch_xla.runtime as xr

    # Replicas have a core each and know of the others; without them, only SPMD uses more than one.
    there = xr.global_runtime_device_count()
    used = there if xr.is_spmd() else xr.world_size()
    cores = f"{used} of {there} cores" if used < there else f"{used} core{'s' * (used > 1)}"
    hosts = f" on {xr.process_count()} hosts" if xr.is_spmd() and xr.process_count() > 1 else ""
    return f"XLA on {xr.device_type()}, {cores}{hosts}"


def rng_state() -> int:
    """Return the state of the device's random numbers, a 64-bit seed.

    Every sync advances it, also one that has nothing to compute, and so does every batch of
    torch_xla's loaders. For an exact resume, save it where a step begins: after the sync of the
    step before, with nothing random traced since. Then see :func:`set_rng_state`.
    """
    import torch_xla.core.xla_model as xm

    return xm.get_rng_state()


def set_rng_state(state: int) -> None:
    """Continue from a state of :func:`rng_state`, or start from a seed.

    For an exact resume, call it immediately before the first step: after the last sync, and after
    the first batch was taken from a loader on the device. A sync between this call and the step
    gives the step other random numbers.
    """
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(state)


def enable_compile_cache(folder: str) -> None:
    """Keep compiled programs in a folder, for this and later processes.

    Call before the first computation. Whether a kept program can be loaded is the runtime's
    affair: the CPU's cannot (it says "Deserializing serialized executable not supported" and
    compiles again), and for TPU under torch_xla 2.9 misses are reported (pytorch/xla#9094).
    """
    import torch_xla.runtime as xr

    xr.initialize_cache(folder, readonly=False)


def sync() -> None:
    """Cut the graph here: what was traced so far is compiled if new, and dispatched."""
    import torch_xla

    torch_xla.sync()


def wait() -> None:
    """Until all that was dispatched has been computed, and counted."""
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def forget_pending(device: torch.device) -> None:
    """Drop what was traced on a device and not computed: its tensors have no value any more."""
    _private.forget_pending(str(device))


def counters() -> Counters:
    """Compilations, fallbacks and scalar reads, as totals since the process started."""
    return metrics.now().brief()


class DeviceLoader:
    """Batches on the device, uploaded in the background while the device computes.

    A thin layer over torch_xla's ``ParallelLoader`` (which ``MpDeviceLoader`` is too). That ends an
    epoch early and silently when the loader under it fails: here the failure is raised where the
    batches are used.

    Args:
        sharding: a ``ShardingSpec`` for every tensor of a batch (SPMD), or None.
    """

    def __init__(self, loader: DataLoader, device: torch.device, sharding: Any = None):
        self._loader = loader
        self._device = device
        self._sharding = sharding

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        from torch_xla.distributed.parallel_loader import ParallelLoader

        failures: list[Exception] = []
        # The upload thread waits until device_prefetch_size batches are there: few, so that the
        # first step starts early.
        feed = ParallelLoader(
            _Watched(self._loader, failures),
            [self._device],
            loader_prefetch_size=4,
            device_prefetch_size=2,
            input_sharding=self._sharding,
        )
        try:
            yield from feed.per_device_loader(self._device)
        finally:
            feed.close()  # an epoch that is left early leaves no threads behind
        if failures:
            raise failures[0]


class _Watched:
    """Iterates as the loader does; keeps the exception that ended it."""

    def __init__(self, loader: DataLoader, failures: list[Exception]):
        self._loader = loader
        self._failures = failures

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        try:
            yield from self._loader
        except Exception as error:  # handed to the training thread, see DeviceLoader
            self._failures.append(error)
