"""MSHNet, an infrared small-target detector, trained on TPU, CUDA and CPU by one code path."""

from .errors import RequestError
from .loss import SLSIoULoss
from .metrics import DetectionMetrics
from .model import MSHNet
from .version import __version__

__all__ = ["DetectionMetrics", "MSHNet", "RequestError", "SLSIoULoss", "__version__"]
