"""Pictures of a run: curves over epochs, and detections drawn on images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from matplotlib.ticker import MaxNLocator
from scipy.ndimage import binary_dilation

from tpuscope.figure import Picture

from .metrics import match, regions

HIT, MISSED, FALSE_ALARM = "#35c759", "#ffb000", "#ff453a"
SHOWN = 6  # images in examples.png


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the image with the mask's outline in red: uint8 (H, W, 3), bool (H, W) → uint8."""
    picture = image.copy()
    # The outline lies outside the region, so that the target stays visible.
    picture[binary_dilation(mask) & ~mask] = (255, 69, 58)
    return picture


def curves(records: Sequence[dict], path: Path | None = None) -> Picture:
    """Draw loss, overlap and detection over epochs.

    A number that a record lacks leaves a gap.

    Args:
        records: lines of ``metrics.jsonl``, see :func:`mshnet.training.run_dir.read_log`.
        path: where to save the picture, if anywhere.
    """
    epochs = [record["epoch"] + 1 for record in records]
    figure = Picture(figsize=(13, 3.8), layout="constrained")
    loss, overlap, detection = figure.subplots(1, 3)
    loss.plot(epochs, _values(records, "loss"), ".-", color="#444")
    loss.set_title("training loss")
    for key, label, colour in (("iou", "IoU", "#0a84ff"), ("niou", "nIoU", "#5e5ce6")):
        overlap.plot(epochs, _values(records, key, 100), ".-", label=label, color=colour)
    overlap.set(title="overlap on test, %", ylim=(0, 100))
    overlap.legend()
    lines = detection.plot(
        epochs, _values(records, "pd", 100), ".-", color=HIT, label="Pd, % (left)"
    )
    detection.set(title="detection on test", ylim=(0, 103))
    alarms = detection.twinx()
    fa = _values(records, "fa", 1e6).clip(min=0.1)  # 0 has no place on a logarithmic axis
    lines += alarms.plot(epochs, fa, ".-", color=FALSE_ALARM, label="Fa, 1e-6 of pixels (right)")
    alarms.set_yscale("log")
    detection.legend(handles=lines, loc="best", fontsize=8)
    warm = [r["epoch"] + 1 for r in records if r.get("phase") == "warm-up"]
    for axis in (loss, overlap, detection):
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if warm and len(warm) < len(records):
            # The two phases have different loss functions: a jump there is no setback.
            axis.axvline(warm[-1] + 0.5, color="#999", linestyle=":")
    if path:
        figure.savefig(path, dpi=120)
    return figure


def examples(
    images: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    predictions: Sequence[np.ndarray],
    names: Sequence[str],
    path: Path | None = None,
) -> Picture:
    """Draw a row for each image: image, mask, prediction, image with hits and errors marked.

    Args:
        images: uint8, (H, W) or (H, W, 3).
        masks: bool, (H, W).
        predictions: bool, (H, W).
        names: labels of the rows.
        path: file to save the picture to, or None.
    """
    rows = len(images)
    figure = Picture(figsize=(11, 2.75 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, 4, squeeze=False)
    for row, image, mask, prediction, name in zip(
        grid, images, masks, predictions, names, strict=True
    ):
        grey = {"cmap": "gray"} if image.ndim == 2 else {}
        row[0].imshow(image, **grey)
        row[0].set_ylabel(name, fontsize=8)
        row[1].imshow(mask, cmap="gray", vmin=0, vmax=1)
        row[2].imshow(prediction, cmap="gray", vmin=0, vmax=1)
        row[3].imshow(image, **grey)
        mark(row[3], mask, prediction)
        for axis in row:
            axis.set(xticks=[], yticks=[])
    titles = ("image", "mask", "prediction", "green hit, orange missed, red false alarm")
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    if path:
        figure.savefig(path, dpi=110)
    return figure


def mark(axis: Axes, mask: np.ndarray, prediction: np.ndarray) -> None:
    """Circle hits in green, missed targets in orange, false alarms in red; bool maps (H, W)."""
    _, found_areas, found = regions(prediction)
    _, target_areas, targets = regions(mask)
    pairs = match(targets, found)
    hit_targets, hits = {i for i, _ in pairs}, {j for _, j in pairs}
    for i, (centre, area) in enumerate(zip(targets, target_areas, strict=True)):
        _circle(axis, centre, area, mask.shape, HIT if i in hit_targets else MISSED)
    for j, (centre, area) in enumerate(zip(found, found_areas, strict=True)):
        if j not in hits:
            _circle(axis, centre, area, mask.shape, FALSE_ALARM)


def _circle(axis: Axes, centre: np.ndarray, area: int, shape: tuple[int, int], colour: str) -> None:
    radius = np.sqrt(area / np.pi) + 0.025 * max(shape)
    axis.add_patch(Circle((centre[1], centre[0]), radius, fill=False, color=colour, linewidth=1.5))


def _values(records: Sequence[dict], key: str, scale: float = 1.0) -> np.ndarray:
    """Return a number of each record, times ``scale``; NaN where there is none."""
    values = np.full(len(records), np.nan)
    for i, record in enumerate(records):
        value = record.get(key)
        if isinstance(value, int | float):
            values[i] = scale * value
    return values
