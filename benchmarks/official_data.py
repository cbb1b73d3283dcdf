"""MSHNet's official data loading and evaluation, rewritten for comparison.

Written from what the official code does: every sample is decoded again by Pillow, augmented in
colour, and handed out as normalised float32 RGB; evaluation takes one image at a time, labels its
regions at eleven thresholds, and copies maps and sums to the host for each of them. Numbers are
those of ``mshnet.metrics`` in the ``official`` definition.
"""

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from skimage import measure
from torch import Tensor
from torch.utils.data import Dataset

from mshnet.data.layout import DataFolder
from mshnet.training.step import DEVIATION, MEAN

THRESHOLDS = 11
NEAR = 3  # pixels between two centroids


class OfficialSet(Dataset):
    """Samples of a split: float32 (3, H, W), normalised, and float32 (1, H, W) of 0 and 1.

    Args:
        folder: of the data set.
        split: ``"train"`` augments by Python's random numbers, ``"test"`` resizes.
        base_size: scale of the augmentation, and side of a resized sample, pixels.
        crop_size: side of an augmented sample, pixels.
    """

    def __init__(self, folder: str | Path, split: str, base_size: int, crop_size: int):
        self.samples = DataFolder(folder).samples(split)
        self.augmented = split == "train"
        self.base_size = base_size
        self.crop_size = crop_size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        image, mask = Image.open(sample.image).convert("RGB"), Image.open(sample.mask)
        if mask.mode != "L":
            mask = mask.convert("L")
        if self.augmented:
            image, mask = self._augment(image, mask)
        else:
            size = (self.base_size, self.base_size)
            image, mask = image.resize(size, Image.BILINEAR), mask.resize(size, Image.NEAREST)
        mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, DEVIATION))
        return (_to_tensor(image) - mean) / deviation, _to_tensor(mask)

    def _augment(self, image: Image.Image, mask: Image.Image) -> tuple[Image.Image, Image.Image]:
        crop = self.crop_size
        if random.random() < 0.5:
            image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
        long_side = random.randint(self.base_size // 2, self.base_size * 2)
        scale = long_side / max(image.size)
        size = tuple(round(side * scale) for side in image.size)
        image, mask = image.resize(size, Image.BILINEAR), mask.resize(size, Image.NEAREST)
        border = (0, 0, max(crop - size[0], 0), max(crop - size[1], 0))
        if any(border):
            image, mask = ImageOps.expand(image, border), ImageOps.expand(mask, border)
        left, top = (random.randint(0, side - crop) for side in image.size)
        box = (left, top, left + crop, top + crop)
        image, mask = image.crop(box), mask.crop(box)
        if random.random() < 0.5:
            image = image.filter(ImageFilter.GaussianBlur(random.random()))
        return image, mask


def _to_tensor(image: Image.Image) -> Tensor:
    """Convert uint8 (H, W) or (H, W, 3) → float32 (1 or 3, H, W), 0..1."""
    values = np.array(image)
    if values.ndim == 2:
        values = values[:, :, None]
    return torch.from_numpy(values).permute(2, 0, 1).contiguous().float().div(255)


class OfficialMetrics:
    """IoU, pixel accuracy, Pd, Fa and ROC, image by image.

    Args:
        size: side of the maps, pixels.
    """

    def __init__(self, size: int):
        self.size = size
        self.images = 0
        self.intersection = self.union = self.correct = self.labelled = 0.0
        self.found, self.false_area, self.targets = (np.zeros(THRESHOLDS) for _ in range(3))
        # tp, positives, fp, negatives, predicted
        self.counts = np.zeros((5, THRESHOLDS))

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add an image: (1, 1, H, W) both, on any device."""
        self.images += 1
        self._overlap(logits, target)
        for number in range(THRESHOLDS):
            self._regions(logits, target, number)
        for number in range(THRESHOLDS):
            self._rates(logits, target, number)

    def numbers(self) -> dict[str, float]:
        """Return the numbers under the names of ``DetectionMetrics.compute()``."""
        tp, positive, fp, negative, _ = self.counts
        return {
            "iou": self.intersection / self.union,
            "pixel_accuracy": self.correct / self.labelled,
            "pd": self.found[0] / self.targets[0],
            "fa": self.false_area[0] / (self.images * self.size**2),
            "tpr": (tp / (positive + 0.001)).tolist(),
            "fpr": (fp / (negative + 0.001)).tolist(),
        }

    def _overlap(self, logits: Tensor, target: Tensor) -> None:
        predicted = (logits > 0).float()
        correct = ((predicted == target).float() * (target > 0).float()).sum()
        labelled = (target > 0).float().sum()
        assert correct <= labelled  # reads both
        self.correct += correct.item()
        self.labelled += labelled.item()
        both = (predicted * (predicted == target).float()).cpu().numpy().sum()
        area = predicted.cpu().numpy().sum() + target.cpu().numpy().sum()
        self.intersection += both
        self.union += area - both

    def _regions(self, logits: Tensor, target: Tensor, number: int) -> None:
        threshold = number * 255 / (THRESHOLDS - 1)  # of logits
        predicted = (logits > threshold).cpu().numpy().astype(np.int64)[0, 0]
        expected = target.cpu().numpy().astype(np.int64)[0, 0]
        regions = measure.regionprops(measure.label(predicted, connectivity=2))
        targets = measure.regionprops(measure.label(expected, connectivity=2))
        areas = [region.area for region in regions]
        matched = []
        for aim in targets:
            for region in regions:
                if np.linalg.norm(np.subtract(region.centroid, aim.centroid)) < NEAR:
                    matched.append(region.area)
                    regions.remove(region)
                    break
        self.targets[number] += len(targets)
        self.found[number] += len(matched)
        self.false_area[number] += sum(area for area in areas if area not in matched)

    def _rates(self, logits: Tensor, target: Tensor, number: int) -> None:
        predicted = (torch.sigmoid(logits) > number / (THRESHOLDS - 1)).float()
        right = (predicted == target).float()
        tp = (predicted * right).sum()
        fp = (predicted * (1 - right)).sum()
        tn = ((1 - predicted) * right).sum()
        fn = ((1 - predicted) * (1 - right)).sum()
        for row, value in enumerate((tp, tp + fn, fp, fp + tn, tp + fp)):
            self.counts[row, number] += value.item()
