"""MSHNet, an infrared small-target detector, trained on TPU, CUDA and CPU by one code path."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpuscope.version import __version__

if TYPE_CHECKING:
    from tpuscope.errors import RequestError

    from .loss import SLSIoULoss
    from .metrics import DetectionMetrics
    from .model import MSHNet

__all__ = ["DetectionMetrics", "MSHNet", "RequestError", "SLSIoULoss", "__version__"]

_HOMES = {
    "DetectionMetrics": "mshnet.metrics",
    "MSHNet": "mshnet.model",
    "RequestError": "tpuscope.errors",
    "SLSIoULoss": "mshnet.loss",
}


def __getattr__(name: str) -> Any:
    # Imported when used: `mshnet --help` answers before torch is loaded.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
