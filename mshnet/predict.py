"""Detect targets in image files of any size."""

import csv
import glob
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from tpuscope.errors import RequestError
from tpuscope.files import write_atomic
from tpuscope.progress import progress

from .data.augment import BILINEAR
from .data.decode import open_image, read_header, to_uint8
from .data.layout import SUFFIXES
from .data.loader import channels_first
from .metrics import regions
from .plots import overlay
from .training.backend import Backend
from .training.step import Normalize, evaluation_step

_FOLDERS = ("masks", "overlays")
Detection = dict  # image (path), x, y (pixels, centre), area (pixels), score (0..1)


def find_images(inputs: Sequence[str]) -> list[Path]:
    """Return the image files that files, folders and glob patterns name, sorted within each.

    Raises:
        RequestError: one of them names no image.
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
                "quoted pattern such as 'frames/*.png'",
                "no-images",
            )
        found += matches
    return list(dict.fromkeys(found))


def check_images(paths: Sequence[Path], out: Path) -> None:
    """Refuse, before any work, damaged inputs and an output that would replace an input.

    Headers and the checksums of PNG files are read, nothing is decoded; so a JPEG or BMP that is
    cut short is found only when :func:`predict` reaches it.

    Raises:
        RequestError: names the file.
    """
    inputs = {path.resolve() for path in paths}
    folders = {(out / folder).resolve() for folder in _FOLDERS}
    replaced = {file.resolve() for folder in folders for file in folder.glob("*")} & inputs
    replaced |= {path for path in inputs if not folders.isdisjoint(path.parents)}
    if replaced:
        raise RequestError(
            f"--out {out}: an output could replace the input {min(replaced)}; choose "
            "another folder",
            "output-is-input",
        )
    for path in progress(paths, "check images"):
        read_header(path, verify=True)


def detections(name: str, probability: np.ndarray) -> tuple[np.ndarray, list[Detection]]:
    """Return mask and table of the detections in one probability map.

    Args:
        name: of the image, for the table.
        probability: float, (H, W), 0..1.

    Returns:
        The mask, bool (H, W), and one detection a region: centre x, y and area in pixels, and as
        score the highest probability in it.
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

    Each file is decoded once. The network sees the image at size × size, as in evaluation; its
    logits are resized to the image's own size (bilinear), so masks, centres and areas are in the
    image's own pixels.

    A file name that is not UTF-8 keeps its bytes: in ``detections.csv`` as they are, in
    ``detections.json`` as the escapes ``\\udc80`` to ``\\udcff``, which Python's ``os.fsencode``
    turns back.

    Args:
        model: on the backend's device.
        backend: where it runs.
        paths: images that :func:`check_images` accepts.
        out: folder for ``masks/``, ``overlays/``, ``detections.csv`` and ``detections.json``.
        size: side of the network's input in pixels, a multiple of 16.
        channels: 1 reads the images grey, 3 in colour.
        full: False uses the full-size head instead of the fused one (weights from warm-up).
        batch_size: images at a time; the last batch is filled up to it.

    Raises:
        RequestError: an image is unreadable, or ``out`` cannot be written. What was written
            before stays.
    """
    rows: list[Detection] = []
    try:
        for folder in _FOLDERS:
            (out / folder).mkdir(parents=True, exist_ok=True)
        maps = _probabilities(model, backend, paths, size, channels, full, batch_size)
        for path, name, (picture, probability) in progress(
            zip(paths, _unique_names(paths), maps, strict=True), "predict", len(paths)
        ):
            mask, found = detections(str(path), probability)
            Image.fromarray(mask.astype(np.uint8) * 255).save(out / "masks" / f"{name}.png")
            Image.fromarray(overlay(picture, mask)).save(out / "overlays" / f"{name}.png")
            rows += found
        table = io.StringIO()
        writer = csv.DictWriter(table, ["image", "x", "y", "area", "score"])
        writer.writeheader()
        writer.writerows(rows)
        content = table.getvalue().encode("utf-8", "surrogateescape")
        write_atomic(out / "detections.csv", content)
        write_atomic(out / "detections.json", json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        raise RequestError(
            f"--out {out} cannot be written ({error.strerror or error}); choose another folder",
            "unwritable",
        ) from error
    return rows


def _probabilities(
    model: nn.Module,
    backend: Backend,
    paths: Sequence[Path],
    size: int,
    channels: int,
    full: bool,
    batch_size: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each image, uint8 (H, W, 3), and its probability map, float32 (H, W)."""
    normalize = Normalize().to(backend.device)
    model.eval()
    phase = backend.to_device(torch.tensor([full]))
    state = [*model.parameters(), *model.buffers(), *normalize.buffers()]
    step = backend.compile_step(
        lambda images, phase: (evaluation_step(model, normalize, backend, images, phase),), state
    )
    for first in range(0, len(paths), batch_size):
        batch = torch.zeros(batch_size, channels, size, size, dtype=torch.uint8)
        pictures = []
        for i, path in enumerate(paths[first : first + batch_size]):
            image = open_image(path)
            pictures.append(to_uint8(image, 3))
            small = Image.fromarray(to_uint8(image, channels)).resize((size, size), BILINEAR)
            batch[i] = channels_first(np.asarray(small))
        [logits] = step(backend.to_device(batch), phase)
        logits = logits.cpu()
        for i, picture in enumerate(pictures):
            shape = list(picture.shape[:2])
            own = F.interpolate(logits[i : i + 1], shape, mode="bilinear", align_corners=False)
            yield picture, torch.sigmoid(own)[0, 0].numpy()


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Return the files' stems; where two are equal, the second gets a number."""
    names: dict[str, None] = {}
    for path in paths:
        name, number = path.stem, 1
        while name in names:
            number += 1
            name = f"{path.stem}_{number}"
        names[name] = None
    return list(names)
