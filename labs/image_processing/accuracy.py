"""Compare torchvision's, PyTorch's and this lab's resizing with OpenCV's; bfloat16's error."""

import functools
from collections.abc import Sequence

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as torchvision

from tpuscope.figure import Picture

from .images import resize, weights


def noise(size: int = 256) -> np.ndarray:
    """Return the hardest frame to resize: independent grey levels, uint8 (size, size)."""
    return np.random.default_rng(0).integers(0, 256, (size, size), dtype=np.uint8)


def resized(frame: np.ndarray, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Resize a frame in several ways without antialiasing, which OpenCV does not have.

    torchvision computes bfloat16 images in float32 and rounds the result; PyTorch's own kernel,
    and :func:`resize`, compute in bfloat16.

    Args:
        frame: (H, W), uint8, or floating point on any scale.

    Returns:
        float32 arrays of the size, by way; the first is OpenCV's, in float32.
    """
    frame = frame.astype(np.float32)
    image = torch.from_numpy(frame)[None, None]
    rounded = image.to(torch.bfloat16)
    interpolate = functools.partial(F.interpolate, size=size, mode="bilinear")
    found = {
        "torchvision, float32": torchvision.resize(image, list(size), antialias=False),
        "resize, float32": resize(image, size, antialias=False),
        "torchvision, bfloat16": torchvision.resize(rounded, list(size), antialias=False),
        "F.interpolate, bfloat16": interpolate(rounded),
        "resize, bfloat16": resize(rounded, size, antialias=False),
    }
    opencv = cv2.resize(frame, size[::-1], interpolation=cv2.INTER_LINEAR)
    return {"OpenCV": opencv} | {way: image[0, 0].float().numpy() for way, image in found.items()}


def accuracy(frame: np.ndarray, size: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Return each way's deviation from OpenCV in :func:`resized`: ``max``, ``median``, ``p99``.

    In units of the frame: grey levels for one from 0 to 255.
    """
    opencv, *ways = resized(frame, size).items()
    return {way: deviation(result, opencv[1]) for way, result in ways}


def deviation(result: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Return ``max``, ``median`` and ``p99`` (99th percentile) of the absolute differences."""
    away = np.abs(np.asarray(result, np.float64) - np.asarray(right, np.float64))
    p99 = float(np.percentile(away, 99))
    return {"max": float(away.max()), "median": float(np.median(away)), "p99": p99}


def bfloat16_losses(frame: np.ndarray, size: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Return bfloat16's error in :func:`resize`, rounding by rounding, against float32.

    Each line has the roundings of the lines before. The result of the first product is rounded to
    bfloat16 before the second takes it; products add up in float32.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).float()

    image = torch.from_numpy(frame.astype(np.float32))[None, None]
    rows, columns = (
        weights(torch.zeros(1), torch.tensor([float(side)]), side, out, antialias=False)
        for side, out in zip(frame.shape, size, strict=True)
    )
    right = rows @ (image @ columns.mT)
    coarse_rows, coarse_columns = rounded(rows), rounded(columns)
    between = rounded(image @ coarse_columns.mT)
    steps = {
        "the image": rows @ (rounded(image) @ columns.mT),
        "and the result": rounded(right),
        "and the weights": rounded(coarse_rows @ (image @ coarse_columns.mT)),
        "and what is between the axes": rounded(coarse_rows @ between),
    }
    return {what: deviation(result.numpy(), right.numpy()) for what, result in steps.items()}


def table(rows: dict[str, dict[str, float]], title: str) -> str:
    """Return deviations as aligned lines."""
    head = f"{title:<30}{'maximum':>12}{'median':>12}{'99th perc.':>12}"
    lines = [
        f"{way:<30}{row['max']:>12.3g}{row['median']:>12.3g}{row['p99']:>12.3g}"
        for way, row in rows.items()
    ]
    return "\n".join([head, *lines])


def difference_picture(frame: np.ndarray, size: tuple[int, int], ways: Sequence[str]) -> Picture:
    """Draw the resized frame, and each way's difference from OpenCV in grey levels."""
    results = resized(frame, size)
    figure = Picture(figsize=(3.0 * (1 + len(ways)), 3.1), dpi=90, layout="constrained")
    first, *others = figure.subplots(1, 1 + len(ways))
    first.imshow(results["OpenCV"], cmap="gray", vmin=0, vmax=255)
    first.set_title("OpenCV", fontsize=9)
    for axis, way in zip(others, ways, strict=True):
        shown = axis.imshow(np.abs(results[way] - results["OpenCV"]), cmap="magma", vmin=0)
        axis.set_title(way, fontsize=9)
        figure.colorbar(shown, ax=axis, shrink=0.75)
    for axis in (first, *others):
        axis.set(xticks=[], yticks=[])
    return figure
