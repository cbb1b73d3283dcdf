"""The XLA runtime: is it there, which cores has it, where a step ends, what did it count.

Nothing here imports torch_xla before a function is called, so that the package works where it is
not installed.
"""

import glob
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata

import torch
from torch.utils.data import DataLoader


class XlaUnavailable(RuntimeError):
    """torch_xla or the device it was asked for is not there; the message says what to do."""


def installed() -> bool:
    """Whether torch_xla is installed."""
    return importlib.util.find_spec("torch_xla") is not None


def require_matching_versions() -> None:
    """The gate before the first import of torch_xla.

    The two packages are bound by a C++ ABI: with different minor versions the import ends in a
    missing symbol.

    Raises:
        XlaUnavailable: torch_xla is missing, or belongs to another torch.
    """
    if not installed():
        where = "" if platform.system() == "Linux" else f" (it has no {platform.system()} build)"
        raise XlaUnavailable(
            f"torch_xla is not installed{where}; on Linux: pip install torch==2.9.0 "
            "torch_xla==2.9.0, or train with --device cuda or --device cpu"
        )
    xla = metadata.version("torch_xla")
    if xla.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise XlaUnavailable(
            f"torch {torch.__version__} and torch_xla {xla} do not belong together; "
            f"pip install 'torch=={'.'.join(xla.split('.')[:2])}.*' "
            "(in Colab: Runtime > Disconnect and delete runtime)"
        )


def tpu_chips() -> int:
    """TPU chips of this machine, counted on the PCI bus without opening them."""
    # Without a device node there is nothing to count, and importing torch_xla takes seconds.
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")) or not installed():
        return 0
    require_matching_versions()
    from torch_xla._internal import tpu

    return tpu.num_available_chips()


def requested_platform() -> str | None:
    """What ``PJRT_DEVICE`` asks for, in capitals (``"TPU"``, ``"CPU"``), or None."""
    return os.environ.get("PJRT_DEVICE", "").upper() or None


def select_platform(name: str) -> None:
    """Choose ``"TPU"`` or ``"CPU"`` for this process; only before the device is first used."""
    os.environ["PJRT_DEVICE"] = name
    require_matching_versions()


def device() -> torch.device:
    """The XLA device of this process; opens the runtime on first use.

    Open it before the first backward pass of the process, on whatever device that is: autograd
    counts the devices then, and a backward pass on one that came later ends in an internal
    assertion about ``device_ready_queues_`` (seen with torch_xla 2.9.0).
    """
    import torch_xla

    return torch_xla.device()


def describe() -> str:
    """For people: the platform, and one core of how many: ``XLA on TPU, 1 of 8 cores``."""
    import torch_xla.runtime as xr

    cores = xr.global_runtime_device_count()
    return f"XLA on {xr.device_type()}, {'1 core' if cores == 1 else f'1 of {cores} cores'}"


def enable_compile_cache(folder: str) -> None:
    """Keep compiled programs in a folder, for this and later processes.

    Call before the first computation. Whether a kept program can be loaded is the runtime's
    affair: the CPU's cannot (it says "Deserializing serialized executable not supported" and
    compiles again), and for TPU under torch_xla 2.9 misses are reported (pytorch/xla#9094).
    """
    import torch_xla.runtime as xr

    xr.initialize_cache(folder, readonly=False)


def end_step() -> None:
    """Cut the graph here: what was traced so far is compiled if new, and dispatched."""
    import torch_xla

    torch_xla.sync()


@dataclass(frozen=True)
class Counters:
    """Totals of this process since it started."""

    compilations: int = 0
    fallbacks: int = 0  # operations that ran on the host because XLA has no lowering for them
    host_reads: int = 0  # scalars fetched from the device

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.compilations - earlier.compilations,
            self.fallbacks - earlier.fallbacks,
            self.host_reads - earlier.host_reads,
        )


# `.item()` is counted among the fallbacks by torch_xla, but it is a read.
_SCALAR_READ = "aten::_local_scalar_dense"


def counters() -> Counters:
    """torch_xla's own counters, as totals since the process started."""
    import torch_xla.debug.metrics as met

    compile_time = met.metric_data("CompileTime")
    fallbacks = [n for n in met.counter_names() if n.startswith("aten::") and n != _SCALAR_READ]
    return Counters(
        compilations=compile_time[0] if compile_time else 0,
        fallbacks=sum(met.counter_value(name) for name in fallbacks),
        host_reads=met.counter_value(_SCALAR_READ) or 0,
    )


class DeviceFeed:
    """Batches on the device, uploaded in the background while the device computes.

    A thin layer over torch_xla's ``MpDeviceLoader``, which ends an epoch early and silently when
    the loader under it fails: here that failure is raised where the batches are used.
    """

    def __init__(self, loader: DataLoader, device: torch.device):
        self._loader = loader
        self._device = device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        from torch_xla.distributed.parallel_loader import MpDeviceLoader

        failures: list[Exception] = []
        # The upload thread waits until device_prefetch_size batches are there: few, so that the
        # first step starts early.
        feed = MpDeviceLoader(
            _Watched(self._loader, failures),
            self._device,
            loader_prefetch_size=4,
            device_prefetch_size=2,
        )
        yield from feed
        if failures:
            raise failures[0]


class _Watched:
    """Iterates as the loader does; keeps the exception that ended it."""

    def __init__(self, loader: Iterable, failures: list[Exception]):
        self._loader = loader
        self._failures = failures

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        try:
            yield from self._loader
        except Exception as error:  # handed to the training thread, see DeviceFeed
            self._failures.append(error)
