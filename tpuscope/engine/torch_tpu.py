"""The TorchTPU engine (package torch_tpu): availability, device, counters, random state.

TorchTPU is PyTorch/XLA's announced successor: an eager device ``tpu`` and a backend of
``torch.compile``. It needs torch 2.11 or newer, so it never shares an environment with torch_xla.
Nothing here imports torch_tpu before a function is called.
"""

import importlib
import importlib.util
import os
import platform
import warnings
from importlib import metadata

import torch
from torch import nn
from torch.nn import functional as F

from .. import versions
from ..errors import RequestError
from . import cpu_plugin, hardware
from .metrics import Counters

_opened: list[torch.device] = []


def installed() -> bool:
    """Return whether torch_tpu is installed."""
    return importlib.util.find_spec("torch_tpu") is not None


def tpu_chips() -> int:
    """Return how many TPU chips the PCI bus of this machine has; they are not opened."""
    return len(hardware.tpu_pci_ids()) if hardware.tpu_nodes() else 0


def require() -> None:
    """Check what is installed, before the first import of torch_tpu.

    Raises:
        RequestError: torch_tpu is missing, torch is too old for it, or torch_xla is there, too.
    """
    if not installed():
        where = "" if platform.system() == "Linux" else f" (it has no {platform.system()} build)"
        raise RequestError(
            f"torch_tpu is not installed{where}; in an environment of its "
            f"own: {versions.install_torch_tpu()}",
            "not-installed",
        )
    version = torch.__version__.split("+")[0]
    least, most = versions.TORCH_OF_TORCH_TPU
    if not least <= tuple(map(int, version.split(".")[:2])) <= most:
        raise RequestError(
            f"torch {version} and torch_tpu {metadata.version('torch_tpu')} do not belong "
            f"together: it needs torch {least[0]}.{least[1]} to {most[0]}.{most[1]}; in an "
            f"environment of its own: {versions.install_torch_tpu()}",
            "versions",
        )
    if importlib.util.find_spec("torch_xla"):
        raise RequestError(
            "torch_xla and torch_tpu are both installed, and belong to different versions of "
            "torch: keep one of them in this environment (`pip uninstall torch_xla`)",
            "versions",
        )


def on_cpu() -> bool:
    """Return whether ``PJRT_DEVICE=CPU`` asks for the CPU in the TPU's place."""
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"


def device() -> torch.device:
    """Return the device ``tpu``; the first call loads torch_tpu and opens it.

    With ``PJRT_DEVICE=CPU`` it computes on the CPU, see :mod:`.cpu_plugin`.

    Open it before the first backward pass of the process, on whatever device that is: autograd
    counts the devices then, and a backward pass on one that came later ends in an internal
    assertion about ``device_ready_queues_``.

    Raises:
        RequestError: torch_tpu does not fit, or the plugin does not.
    """
    if not _opened:
        require()
        if on_cpu():
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no TPU, so no metadata about one
            cpu_plugin.prepare()
        os.environ.setdefault("TPU_MIN_LOG_LEVEL", "2")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        loader = importlib.import_module("torch_tpu._loader")
        loader._init_device("tpu")
        _opened.append(torch.device("tpu"))
    return _opened[0]


def describe() -> str:
    """Return engine, platform and version for people."""
    place = "the CPU (a plugin of this project's choice, not Google's)" if on_cpu() else "TPU"
    return f"TorchTPU {metadata.version('torch_tpu')} on {place}"


def wait() -> None:
    """Wait until everything that was dispatched has been computed."""
    torch.accelerator.synchronize()


def counters() -> Counters:
    """Return the programs compiled since the process started.

    Fallbacks are 0: an operation without a lowering is an error. Reads are not counted here.
    """
    return Counters(compilations=_cache().num_compilations)


def requests() -> int:
    """Return how often eager operations have asked for a program since the process started."""
    return _cache().num_cache_reqs


def _cache():
    return torch.tpu._get_cache_stats()  # pyright: ignore[reportAttributeAccessIssue]


def loses_batch_norm_statistics() -> bool:
    """Return whether batch norm leaves its running statistics as they were, seen by trying.

    So it is in torch_tpu 0.2.0, where a model with ``nn.BatchNorm`` trains rightly and is then
    evaluated with means of 0 and variances of 1.
    """
    mean, variance = (torch.zeros(1, device=device()) for _ in range(2))
    F.batch_norm(torch.ones(2, 1, device=device()), mean, variance, training=True)
    return not mean.cpu().any()


def require_batch_norm(model: nn.Module) -> None:
    """Refuse a model whose evaluation would use statistics that training never moves.

    Raises:
        RequestError: it holds a batch norm with running statistics, and they are lost here.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    layers = [m for m in layers if m.track_running_stats]
    if layers and loses_batch_norm_statistics():
        raise RequestError(
            f"{type(layers[0]).__name__}: torch_tpu {metadata.version('torch_tpu')} does not "
            "update the running statistics of batch norm, so the trained model would be evaluated "
            "with means of 0 and variances of 1; run the step as one program "
            "(tpuscope.engine.fx_step.FxStep), which updates them",
            "batch-norm",
        )


def seed(value: int) -> None:
    """Seed the device's random numbers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ApiStage")  # "experimental"
        torch.tpu.manual_seed(value)  # pyright: ignore[reportAttributeAccessIssue]
