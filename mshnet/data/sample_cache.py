"""Decoded samples of one split: every file is read once before the work starts.

That one pass finds each damaged file while nothing is lost yet, and fills the cache, so that
training never decodes again: ``ram`` keeps the arrays, ``disk`` keeps them in one
memory-mapped file that later runs find again, ``none`` decodes at every access.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from tpuscope.errors import RequestError
from tpuscope.progress import progress

from ..choices import CACHES as CACHES
from .decode import read_image, read_mask
from .layout import Sample


def read_sample(sample: Sample, channels: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Image, mask of 0 and 1, and whether the mask was not binary.

    Raises:
        RequestError: a file is unreadable, or image and mask differ in size.
    """
    image = read_image(sample.image, channels)
    mask, touched = read_mask(sample.mask)
    if image.shape[:2] != mask.shape:
        raise RequestError(
            f"{sample.image} is {image.shape[1]}×{image.shape[0]} but its mask {sample.mask} is "
            f"{mask.shape[1]}×{mask.shape[0]}; they must have the same size: "
            "replace the wrong one or take the name off the list"
        )
    return image, mask, touched


class SampleCache:
    """Indexable (image, mask) pairs, decoded and checked.

    Args:
        samples: what to read.
        channels: 1 (grey) or 3.
        cache: ``"ram"``, ``"disk"`` or ``"none"``.
        title: shown beside the progress bar.

    Attributes:
        touched: names of the samples whose mask was not binary.
        empty: names of the samples whose mask has no target.

    Raises:
        RequestError: a file cannot be used, or the set does not fit into memory or on disk.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        channels: int = 1,
        cache: str = "ram",
        title: str = "read images",
    ):
        self.samples = list(samples)
        self.channels = channels
        self.touched: list[str] = []
        self.empty: list[str] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._file: _DiskCache | None = None
        if cache == "ram":
            self._require_memory()
            self._arrays = [(image, mask) for image, mask in self._read_all(title)]
        elif cache == "disk":
            self._file = _DiskCache(self.samples, channels)
            if self._file.complete():
                self.touched, self.empty = self._file.notes()
            else:
                self._file.write(self._read_all(title), lambda: (self.touched, self.empty))
        else:
            for _ in self._read_all(title):
                pass

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Image uint8 (H, W) or (H, W, 3) and mask uint8 0/1 (H, W)."""
        if self._arrays is not None:
            return self._arrays[index]
        if self._file is not None:
            return self._file[index]
        return read_sample(self.samples[index], self.channels)[:2]

    def _read_all(self, title: str):
        """All samples in order; Pillow decodes outside the interpreter lock, so threads help."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # In portions: all at once, decoded images would pile up before a slow disk.
            portions = (self.samples[i : i + 64] for i in range(0, len(self.samples), 64))
            read = (
                (sample, result)
                for portion in portions
                for sample, result in zip(
                    portion, pool.map(lambda s: read_sample(s, self.channels), portion), strict=True
                )
            )
            for sample, (image, mask, touched) in progress(read, title, len(self.samples)):
                if touched:
                    self.touched.append(sample.name)
                if not mask.any():
                    self.empty.append(sample.name)
                yield image, mask

    def _require_memory(self) -> None:
        need = sum(_decoded_bytes(s, self.channels) for s in self.samples)
        free = _free_memory()
        if free is not None and need > free / 2:
            raise RequestError(
                f"{len(self.samples)} decoded images take {need / 1e9:.1f} GB, more than half of "
                f"the {free / 1e9:.1f} GB of free memory: use --cache disk"
            )


_DECODING = 1  # part of a disk cache's name: raise it when the same files decode to other pixels


class _DiskCache:
    """One file of pixels for one list of samples, named by what it was made from."""

    def __init__(self, samples: list[Sample], channels: int):
        key = hashlib.sha256(f"{_DECODING}|{channels}".encode())
        for sample in samples:
            for path in (sample.image, sample.mask):
                try:
                    state = path.stat()
                except FileNotFoundError as error:
                    raise RequestError(f"{path} does not exist") from error
                key.update(f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}".encode())
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._pixels = root / "mshnet" / f"{key.hexdigest()[:24]}.pixels"
        self._table = self._pixels.with_suffix(".json")
        self._map: np.ndarray | None = None
        self._offsets: list[tuple[int, list[int]]] = []

    def complete(self) -> bool:
        """The table is written last; after a power cut either file may be short all the same."""
        try:
            return self._pixels.stat().st_size == json.loads(self._table.read_text())["bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def notes(self) -> tuple[list[str], list[str]]:
        table = json.loads(self._table.read_text())
        return table["touched"], table["empty"]

    def write(self, pairs, notes) -> None:
        part = self._pixels.with_suffix(f".{os.getpid()}.part")
        try:
            self._pixels.parent.mkdir(parents=True, exist_ok=True)
            offsets, position = [], 0
            with open(part, "wb") as file:
                for image, mask in pairs:
                    offsets.append((position, list(image.shape)))
                    position += file.write(image.tobytes()) + file.write(mask.tobytes())
            os.replace(part, self._pixels)
            touched, empty = notes()
            table = {"offsets": offsets, "bytes": position, "touched": touched, "empty": empty}
            part.write_text(json.dumps(table))
            os.replace(part, self._table)
        except OSError as error:
            raise RequestError(
                f"the disk cache {self._pixels.parent} cannot be written ({error.strerror}); "
                "free some space, set XDG_CACHE_HOME to another disk, or use --cache none"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self._map is None:
            self._map = np.memmap(self._pixels, np.uint8, "r")
            self._offsets = json.loads(self._table.read_text())["offsets"]
        start, shape = self._offsets[index]
        pixels = int(np.prod(shape))
        area = shape[0] * shape[1]
        image = np.asarray(self._map[start : start + pixels]).reshape(shape)
        mask = np.asarray(self._map[start + pixels : start + pixels + area]).reshape(shape[:2])
        return image, mask

    def __getstate__(self) -> dict:
        # A pickled memmap would carry all its pixels to each worker.
        return self.__dict__ | {"_map": None, "_offsets": []}


def _decoded_bytes(sample: Sample, channels: int) -> int:
    """Size after decoding, from the file's header alone; 0 where the header is unreadable."""
    try:
        with Image.open(sample.image) as image:
            return image.width * image.height * (channels + 1)
    except (OSError, SyntaxError, ValueError):
        return 0  # the decoding pass reports it with its name


def _free_memory() -> int | None:
    """Bytes available now, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")), None)
