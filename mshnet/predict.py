"""Detect targets in image files of any size."""

import csv
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tpuscope.errors import RequestError
from tpuscope.progress import progress

from .data.augment import BILINEAR
from .data.decode import read_image
from .data.layout import SUFFIXES
from .data.loader import channels_first
from .metrics import regions
from .plots import overlay
from .training.backend import Backend
from .training.step import Normalize, evaluation_step

Detection = dict  # image (path), x, y (pixels, centre), area (pixels), score (0..1)


def find_images(inputs: Sequence[str]) -> list[Path]:
    """Image files named by files, folders and glob patterns, sorted within each.

    Raises:
        RequestError: one of them names nothing.
    """
    found: list[Path] = []
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            matches = [p for p in sorted(path.iterdir()) if p.suffix.lower() in SUFFIXES]
        elif path.is_file():
            matches = [path]
        else:
            named = (Path(name) for name in sorted(glob.glob(item, recursive=True)))
            matches = [p for p in named if p.is_file() and p.suffix.lower() in SUFFIXES]
        if not matches:
            raise RequestError(
                f"{item} names no image; give a file, a folder with png, bmp or jpg files, or a "
                "quoted pattern such as 'frames/*.png'"
            )
        found += matches
    return list(dict.fromkeys(found))


def detections(name: str, probability: np.ndarray) -> tuple[np.ndarray, list[Detection]]:
    """Mask and table of the detections in one probability map.

    Args:
        probability: float, (H, W), 0..1.

    Returns:
        mask bool (H, W); a detection a region: centre x, y and area in pixels, and as score the
        highest probability in it.
    """
    mask = probability > 0.5
    labels, areas, centroids = regions(mask)
    peaks = np.zeros(len(areas))
    np.maximum.at(peaks, labels[mask] - 1, probability[mask])
    rows = [
        {
            "image": name,
            "x": round(float(x), 2),
            "y": round(float(y), 2),
            "area": int(area),
            "score": round(float(peak), 4),
        }
        for area, (y, x), peak in zip(areas, centroids, peaks, strict=True)
    ]
    return mask, rows


def predict(
    model: nn.Module,
    backend: Backend,
    paths: Sequence[Path],
    out: Path,
    size: int = 256,
    channels: int = 1,
    full: bool = True,
    batch_size: int = 8,
) -> list[Detection]:
    """Write masks, overlays and the table of detections for image files.

    The network sees each image at size × size, as in evaluation; its logits go back to the
    image's own size (bilinear), so masks, centres and areas are in the image's own pixels.

    Args:
        model: on the backend's device.
        paths: readable images.
        out: folder for ``masks/``, ``overlays/``, ``detections.csv`` and ``detections.json``.
        size: side of the network's input in pixels, a multiple of 16.
        channels: 1 reads the images grey, 3 in colour.
        batch_size: images at a time; the last batch is filled up to it.
        full: False takes the full-size head instead of the fused one (weights from warm-up).

    Raises:
        RequestError: an image is unreadable, or ``out`` cannot be written. What was written
            before stays.
    """
    rows: list[Detection] = []
    try:
        for folder in ("masks", "overlays"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        maps = _probabilities(model, backend, paths, size, channels, full, batch_size)
        names = _unique_names(paths)
        for path, name, probability in progress(
            zip(paths, names, maps, strict=True), "predict", len(paths)
        ):
            mask, found = detections(str(path), probability)
            Image.fromarray(mask.astype(np.uint8) * 255).save(out / "masks" / f"{name}.png")
            picture = overlay(read_image(path, 3), mask)
            Image.fromarray(picture).save(out / "overlays" / f"{name}.png")
            rows += found
        with open(out / "detections.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["image", "x", "y", "area", "score"])
            writer.writeheader()
            writer.writerows(rows)
        (out / "detections.json").write_text(json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        raise RequestError(
            f"--out {out} cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    return rows


class _Frames(Dataset):
    """Network inputs with their index and own size."""

    def __init__(self, paths: Sequence[Path], size: int, channels: int):
        self.paths = paths
        self.size = size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, tuple[int, int]]:
        array = read_image(self.paths[index], self.channels)
        small = Image.fromarray(array).resize((self.size, self.size), BILINEAR)
        return channels_first(np.asarray(small)), array.shape[:2]


def _probabilities(
    model: nn.Module,
    backend: Backend,
    paths: Sequence[Path],
    size: int,
    channels: int,
    full: bool,
    batch_size: int,
) -> Iterator[np.ndarray]:
    """Probability maps in each image's own size, float32 (H, W)."""
    normalize = Normalize().to(backend.device)
    model.eval()
    phase = backend.to_device(torch.tensor([full]))
    state = [*model.parameters(), *model.buffers(), *normalize.buffers()]
    step = backend.compile_step(
        lambda images, phase: (evaluation_step(model, normalize, backend, images, phase),), state
    )
    loader = DataLoader(_Frames(paths, size, channels), batch_size, collate_fn=list)
    for frames in loader:
        batch = torch.zeros(batch_size, channels, size, size, dtype=torch.uint8)
        for i, (pixels, _) in enumerate(frames):
            batch[i] = pixels
        [logits] = step(backend.to_device(batch), phase)
        logits = logits.cpu()
        for i, (_, shape) in enumerate(frames):
            own = F.interpolate(logits[i : i + 1], shape, mode="bilinear", align_corners=False)
            yield torch.sigmoid(own)[0, 0].numpy()


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Stems; where two files share one, the second gets a number."""
    names: dict[str, None] = {}
    for path in paths:
        name, number = path.stem, 1
        while name in names:
            number += 1
            name = f"{path.stem}_{number}"
        names[name] = None
    return list(names)
