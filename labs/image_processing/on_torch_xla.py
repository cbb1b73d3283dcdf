"""The same operations under torch_xla, in a separate process.

torch_xla and jax would both open the TPU, and it has one user at a time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .images import SIZE, Box, as_data, crop, crop_resize, frames, process
from .network import narrow_network


class UnderTorchXla(NamedTuple):
    """The results of torch_xla's process.

    Attributes:
        processed: of :func:`process`, float32 (B, 1, *SIZE).
        logits: of the narrow network, float32 (B, 1, H, W).
        before: counts and report of cropping each frame by slicing: ``compilations``,
            ``fallbacks``, ``text``.
        after: the same with :func:`crop_resize`.
    """

    processed: np.ndarray
    logits: np.ndarray
    before: dict
    after: dict


def under_torch_xla(count: int = 5, size: int = 128) -> UnderTorchXla:
    """Run :func:`process` and MSHNet on the built-in scenes under torch_xla, XLA on the CPU.

    In a process of its own, and on the CPU also where there is a TPU, which is jax's.

    Raises:
        RuntimeError: that process failed; the message is its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "labs.image_processing.on_torch_xla",
                folder,
                str(count),
                str(size),
            ],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PJRT_DEVICE": "CPU"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"torch_xla's process failed: {said[-1]}")
        arrays = np.load(Path(folder) / "arrays.npz")
        counts = json.loads((Path(folder) / "counts.json").read_text())
        return UnderTorchXla(arrays["processed"], arrays["logits"], **counts)


def _answer(folder: Path, count: int, size: int) -> None:
    """Write ``arrays.npz`` and ``counts.json`` to the folder."""
    images, _, boxes = frames(count, size)

    import torch_xla

    device = torch_xla.device()

    def sliced(image: Tensor, box: Box) -> Tensor:
        # F.interpolate, as one would write it; without antialias, which torch_xla does not have.
        cut = crop(image.to(device), box)
        return F.interpolate(cut, size=SIZE, mode="bilinear", align_corners=False)

    def weighted(image: Tensor, box: Box) -> Tensor:
        return crop_resize(image.to(device), as_data([box]).to(device), antialias=False)

    counts = {
        "before": _watched(sliced, images, boxes),
        "after": _watched(weighted, images, boxes),
    }
    network = narrow_network().eval().to(device)
    with torch.no_grad():
        processed = process(images.to(device), as_data(boxes).to(device))
        _, logits = network(images.to(device) / 255, True)
        torch_xla.sync()
    np.savez(folder / "arrays.npz", processed=processed.cpu(), logits=logits.cpu())
    (folder / "counts.json").write_text(json.dumps(counts))


def _watched(function: Callable, images: Tensor, boxes: Sequence[Box]) -> dict:
    """Call a function on each image with its box, a step each, and return the report."""
    import torch_xla

    from tpuscope import watch

    with watch() as w:
        for image, box in zip(images.split(1), boxes, strict=True):
            kept = function(image, box)
            torch_xla.sync()
            del kept
    report = w.report()
    return {
        "compilations": report.compilations,
        "fallbacks": report.fallbacks,
        "text": str(report),
    }


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
