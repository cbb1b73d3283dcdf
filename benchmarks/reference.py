"""The reference implementation: rewritten in benchmarks/, or a checkout of the official code."""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import official
from official_data import OfficialMetrics, OfficialSet
from torch import Tensor, nn
from torch.utils.data import Dataset

from mshnet import RequestError

FILES = ("model/MSHNet.py", "model/loss.py", "utils/data.py", "utils/metric.py")


class Metrics(Protocol):
    """Metrics that are updated image by image."""

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add an image: (1, 1, H, W) both, on any device."""

    def numbers(self) -> dict[str, float]:
        """iou, pixel_accuracy, pd, fa, and the lists tpr and fpr."""


@dataclass(frozen=True)
class Official:
    """The parts of the implementation to compare with.

    Attributes:
        name: for the table.
        network: (widths, depths) → network.
        criterion: loss of one map: logits, target, warm_epoch, epoch.
        samples: (folder, split, base_size, crop_size) → normalised samples.
        metrics: side of the maps → metrics.
    """

    name: str
    network: Callable[[tuple, tuple], nn.Module]
    criterion: Callable[[Tensor, Tensor, int, int], Tensor]
    samples: Callable[[str, str, int, int], Dataset]
    metrics: Callable[[int], Metrics]


def choose(checkout: str | None) -> Official:
    """Return the official code of a folder, or its rewrite in benchmarks/.

    Raises:
        RequestError: the folder holds something else, or something of it cannot be imported.
    """
    if checkout is None:
        return Official(
            "benchmarks/official.py",
            lambda widths, depths: official.OfficialMSHNet(3, widths, depths),
            official.sls_loss,
            OfficialSet,
            OfficialMetrics,
        )
    folder = require_checkout(checkout)
    sys.path.insert(0, str(folder))
    try:
        from model.loss import SLSIoULoss
        from model.MSHNet import MSHNet
        from utils.data import IRSTD_Dataset
        from utils.metric import PD_FA, ROCMetric, mIoU
    except ImportError as error:
        raise RequestError(f"--official {folder}: {error}; install what it imports") from error

    def samples(folder: str, split: str, base_size: int, crop_size: int) -> Dataset:
        about = Namespace(dataset_dir=folder, base_size=base_size, crop_size=crop_size)
        return IRSTD_Dataset(about, mode={"train": "train", "test": "val"}[split])

    class CheckoutMetrics:
        def __init__(self, size: int):
            self.images = 0
            self.parts = mIoU(1), PD_FA(1, 10, size), ROCMetric(1, 10)

        def update(self, logits: Tensor, target: Tensor) -> None:
            self.images += 1
            for part in self.parts:
                part.update(logits, target)

        def numbers(self) -> dict[str, Any]:
            overlap, regions, rates = self.parts
            accuracy, iou = overlap.get()
            fa, pd = regions.get(self.images)
            tpr, fpr, *_ = rates.get()
            names = {"iou": iou, "pixel_accuracy": accuracy, "pd": pd[0], "fa": fa[0]}
            return {k: float(v) for k, v in names.items()} | {
                "tpr": [float(v) for v in tpr],
                "fpr": [float(v) for v in fpr],
            }

    # The checkout's network has one size.
    return Official(
        f"checkout {folder}", lambda *_: MSHNet(3), SLSIoULoss(), samples, CheckoutMetrics
    )


def require_checkout(path: str) -> Path:
    """Return the folder if it holds the official code.

    Raises:
        RequestError: it does not.
    """
    folder = Path(path).resolve()
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise RequestError(
            f"--official {path}: {', '.join(missing)} not there; name a checkout of the official "
            "code, https://github.com/Lliu666/MSHNet"
        )
    return folder
