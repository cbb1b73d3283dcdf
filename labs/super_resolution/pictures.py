"""Curves of a run, and frames side by side with a zoom on the target."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Rectangle
from scipy.ndimage import center_of_mass, label

from tpuscope.figure import Picture

COLOURS = {
    "pixel": "#0a84ff",
    "perceptual": "#5e5ce6",
    "adversarial": "#ff9f0a",
    "discriminator": "#444444",
    "judged_real": "#35c759",
    "judged_made": "#ff453a",
}


def curves(records: Sequence[dict], path: Path | None = None) -> Picture:
    """Draw losses over steps: pixel and perceptual, adversarial, and the discriminator's output.

    Args:
        records: of :class:`.training.Run`.
        path: where to save the picture, if anywhere.
    """
    figure = Picture(figsize=(10, 3), dpi=80, layout="constrained")
    groups = (
        ("what the frames look like", ("pixel", "perceptual")),
        ("the game", ("adversarial", "discriminator")),
        ("held for real, mean", ("judged_real", "judged_made")),
    )
    for axis, (title, names) in zip(figure.subplots(1, 3), groups, strict=True):
        for name in names:
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                axis.plot(*zip(*points, strict=True), ".-", color=COLOURS[name], label=name)
        axis.set(title=title, xlabel="step", xlim=(0, records[-1]["step"] * 1.03))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
        begins = max((r["step"] for r in records if r["phase"] == "content"), default=0)
        axis.axvline(begins, color="#999999", linestyle=":")
    figure.axes[0].set_yscale("log")
    figure.axes[2].set_ylim(0, 1)
    if path:
        figure.savefig(path)
    return figure


def comparison(
    versions: dict[str, np.ndarray], mask: np.ndarray, zoom: int = 8, path: Path | None = None
) -> Picture:
    """Draw a column for each version of a frame: the whole, and a zoom on its largest target.

    Args:
        versions: by title, uint8 (H, W); low resolution is drawn as large as the others.
        mask: full size, 0 is background.
        zoom: half side of the detail, pixels of full size.
        path: where to save the picture, if anywhere.

    Raises:
        ValueError: the mask has no target.
    """
    y, x = _largest(mask)
    y, x = (int(np.clip(c, zoom, side - zoom)) for c, side in zip((y, x), mask.shape, strict=True))
    last = list(versions.values())[-1][y - zoom : y + zoom, x - zoom : x + zoom]
    grey = {"cmap": "gray", "vmin": 0, "vmax": 255}
    near = {"cmap": "gray", "vmin": float(last.min()), "vmax": float(last.max())}
    figure = Picture(figsize=(2.4 * len(versions), 5.0), dpi=80, layout="constrained")
    above, below = figure.subplots(2, len(versions))
    for top, bottom, (title, frame) in zip(above, below, versions.items(), strict=True):
        step = mask.shape[0] // frame.shape[0]
        top.imshow(frame, **grey)
        corner = (x - zoom) / step - 0.5, (y - zoom) / step - 0.5
        side = 2 * zoom / step
        top.add_patch(Rectangle(corner, side, side, fill=False, color="#ff9f0a"))
        top.set_title(title, fontsize=10)
        bottom.imshow(frame, interpolation="nearest", **near)
        bottom.set(xlim=(corner[0], corner[0] + side), ylim=(corner[1] + side, corner[1]))
        for axis in (top, bottom):
            axis.set(xticks=[], yticks=[])
    if path:
        figure.savefig(path)
    return figure


def _largest(mask: np.ndarray) -> tuple[float, float]:
    """Return the centre (y, x) of the largest region."""
    regions, count = label(mask != 0)
    if not count:
        raise ValueError("the mask has no target to zoom on; choose another frame")
    sizes = np.bincount(regions.ravel())[1:]
    return center_of_mass(regions == 1 + int(sizes.argmax()))
