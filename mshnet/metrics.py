"""Detection metrics of the field: IoU, nIoU, pixel accuracy, Pd, Fa and ROC.

Two definitions. ``corrected`` counts a predicted region as a false alarm when it was not
matched to a target. ``official`` reproduces the numbers of the official MSHNet code, which
recognises matched regions by their *area*: an unmatched region as large as a matched one of the
same image vanishes, so its Fa is lower. Everything else is the same in both.

Not reproduced: the official training log divides Pd by a target count that is never reset
between epochs. A single evaluation, as for published numbers, is not affected.
"""

from collections.abc import Sequence
from typing import Literal, cast, get_args

import numpy as np
import torch
from skimage.measure import label
from torch import Tensor

MATCH_DISTANCE = 3.0  # pixels between centroids, strictly less
THRESHOLDS = torch.tensor([i / 10 for i in range(11)])
Definition = Literal["corrected", "official"]
DEFINITIONS: tuple[Definition, ...] = get_args(Definition)


def regions(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the 8-connected regions of a binary map, in raster order of their first pixel.

    Args:
        mask: bool or 0/1, (H, W).

    Returns:
        ``labels`` int (H, W), 0 is background; ``areas`` int (N,) in pixels; ``centroids``
        float64 (N, 2) as (y, x) in pixels.
    """
    mask = np.asarray(mask) != 0
    labels = np.zeros(mask.shape, np.int64)
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    if len(rows) == 0:
        return labels, np.zeros(0, np.int64), np.zeros((0, 2))
    # Targets are small: only their common bounding box is searched.
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    labelled = label(mask[box], connectivity=2, return_num=True)
    found, count = cast(tuple[np.ndarray, int], labelled)
    labels[box] = found
    y, x = np.nonzero(found)
    of_pixel = found[y, x] - 1
    areas = np.bincount(of_pixel, minlength=count)
    axes = y + rows[0], x + columns[0]
    centroids = [np.bincount(of_pixel, weights=axis, minlength=count) / areas for axis in axes]
    return labels, areas, np.stack(centroids, axis=1)


def match(targets: np.ndarray, predictions: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs (target, prediction): each target takes the first free prediction within 3 px.

    Args:
        targets: centroids, (N, 2), in label order.
        predictions: centroids, (M, 2), in label order.
    """
    pairs: list[tuple[int, int]] = []
    free = np.ones(len(predictions), bool)
    for i, centre in enumerate(targets):
        near = free & (np.hypot(*(predictions - centre).T) < MATCH_DISTANCE)
        if near.any():
            j = int(near.argmax())
            free[j] = False
            pairs.append((i, j))
    return pairs


class DetectionMetrics:
    """Accumulates counts over images; ``compute()`` returns the metrics.

    Args:
        size: side of the square maps in pixels, or (height, width). Fa is a share of all pixels
            of all images.
        definition: ``"corrected"`` or ``"official"`` (see the module's text).
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        definition: Definition = "corrected",
    ):
        self.size = tuple(size) if isinstance(size, Sequence) else (int(size), int(size))
        self.definition: Definition = _checked(definition)
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.images = 0
        self.intersection = self.union = self.correct = self.positive = 0
        self.iou_sum = 0.0
        self.targets = self.matched = 0
        self.false_area = dict.fromkeys(DEFINITIONS, 0)
        self.roc_true = torch.zeros(len(THRESHOLDS), dtype=torch.int64)
        self.roc_false = torch.zeros(len(THRESHOLDS), dtype=torch.int64)

    def update(self, logits: Tensor | np.ndarray, target: Tensor | np.ndarray) -> None:
        """Add a batch.

        Args:
            logits: (B, 1, H, W) or (B, H, W), any float dtype and device; detected is > 0.
            target: the same shape, 0 or 1 (any other value than 0 counts as target).

        Raises:
            ValueError: the shapes differ from each other or from ``size``.
        """
        logits = torch.as_tensor(logits).detach().cpu().float()
        target = torch.as_tensor(target).detach().cpu() != 0
        shape = tuple(logits.shape)
        if logits.shape != target.shape or shape[1:] not in (self.size, (1, *self.size)):
            raise ValueError(
                f"logits {shape} and target {tuple(target.shape)} must both be "
                f"(B, 1, {self.size[0]}, {self.size[1]})"
            )
        logits, target = (m.reshape(-1, *self.size) for m in (logits, target))
        detected = logits > 0
        self._update_pixels(detected, target)
        self._update_roc(torch.sigmoid(logits), target)
        for prediction, mask in zip(detected.numpy(), target.numpy(), strict=True):
            self._update_regions(prediction, mask)

    def _update_pixels(self, detected: Tensor, target: Tensor) -> None:
        intersection = (detected & target).sum((1, 2))
        union = (detected | target).sum((1, 2))
        self.images += len(detected)
        self.intersection += int(intersection.sum())
        self.union += int(union.sum())
        self.correct += int(intersection.sum())
        self.positive += int(target.sum())
        # An image without a target and without a prediction has IoU 1.
        iou = torch.where(union == 0, 1.0, intersection.double() / union.clamp(min=1))
        self.iou_sum += float(iou.sum())

    def _update_roc(self, probability: Tensor, target: Tensor) -> None:
        # bucketize counts the thresholds strictly below each pixel, so one histogram gives all
        # eleven counts.
        passed = torch.bucketize(probability, THRESHOLDS)
        bins = len(THRESHOLDS) + 1
        both = torch.bincount((passed + bins * target).flatten(), minlength=2 * bins)
        for counts, histogram in zip(
            (self.roc_false, self.roc_true), both.split(bins), strict=True
        ):
            counts += histogram.flip(0).cumsum(0).flip(0)[1:]

    def _update_regions(self, prediction: np.ndarray, mask: np.ndarray) -> None:
        _, areas, centroids = regions(prediction)
        _, _, targets = regions(mask)
        pairs = match(targets, centroids)
        found = [j for _, j in pairs]
        self.targets += len(targets)
        self.matched += len(pairs)
        self.false_area["corrected"] += int(np.delete(areas, found).sum())
        self.false_area["official"] += int(areas[~np.isin(areas, areas[found])].sum())

    def pack(self) -> Tensor:
        """Return all sums as one exact vector, float64 (N,), for adding up parts of a split."""
        counts = [self.images, self.intersection, self.union, self.correct, self.positive]
        counts += [self.targets, self.matched, *self.false_area.values()]
        sums = torch.tensor([*counts, self.iou_sum], dtype=torch.float64)
        return torch.cat([sums, self.roc_true.double(), self.roc_false.double()])

    def unpack(self, packed: Tensor) -> None:
        """Replace all sums by a vector of :meth:`pack`, or by a sum of several."""
        counts, (self.iou_sum,), roc_true, roc_false = (
            part.tolist() for part in packed.split([9, 1, len(THRESHOLDS), len(THRESHOLDS)])
        )
        (
            self.images,
            self.intersection,
            self.union,
            self.correct,
            self.positive,
            self.targets,
            self.matched,
            *areas,
        ) = map(int, counts)
        self.false_area = dict(zip(DEFINITIONS, map(int, areas), strict=True))
        self.roc_true = torch.tensor(roc_true).long()
        self.roc_false = torch.tensor(roc_false).long()

    def compute(self, definition: Definition | None = None) -> dict:
        """Return the metrics of all images so far.

        Args:
            definition: of Fa; the constructor's by default.

        Returns:
            ``iou`` (over the whole set), ``niou`` (mean over images), ``pixel_accuracy`` (found
            target pixels), ``pd`` (found targets), each 0..1 and NaN where nothing was there to
            count; ``fa`` (false-alarm area over all pixels, usually quoted in 1e-6); ``roc``: a
            dict of lists ``thresholds``, ``tpr``, ``fpr``.

        Raises:
            ValueError: no image was added.
        """
        if self.images == 0:
            raise ValueError("no image was added: call update(logits, target) first")
        pixels = self.images * self.size[0] * self.size[1]
        return {
            "iou": _share(self.intersection, self.union),
            "niou": self.iou_sum / self.images,
            "pixel_accuracy": _share(self.correct, self.positive),
            "pd": _share(self.matched, self.targets),
            "fa": self.false_area[_checked(definition or self.definition)] / pixels,
            "roc": {
                "thresholds": [round(t, 1) for t in THRESHOLDS.tolist()],
                # 0.001 is the official guard against division by zero.
                "tpr": (self.roc_true / (self.positive + 0.001)).tolist(),
                "fpr": (self.roc_false / (pixels - self.positive + 0.001)).tolist(),
            },
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _checked(definition: Definition) -> Definition:
    if definition not in DEFINITIONS:
        raise ValueError(f"definition {definition!r}: choose one of {', '.join(DEFINITIONS)}")
    return definition
