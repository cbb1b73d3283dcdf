"""Decoded samples of one split: every file is read once before the work starts.

This pass finds damaged files before any work can be lost, and fills the cache, so that training
decodes nothing again: ``ram`` keeps the arrays, ``disk`` keeps them in one memory-mapped file that
later runs reuse, ``none`` decodes at every access.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import numpy as np

from tpuscope.errors import RequestError
from tpuscope.files import cache_folder, write_atomic
from tpuscope.host_memory import host_memory
from tpuscope.progress import progress

from ..choices import CACHES as CACHES
from .decode import read_header, read_image, read_mask
from .layout import Sample, require_regular


def read_sample(sample: Sample, channels: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return image, mask of 0 and 1, and whether the mask was not binary.

    Args:
        sample: both paths are set.
        channels: 1 (grey) or 3.

    Raises:
        RequestError: a file is unreadable, or image and mask differ in size.
    """
    assert sample.image and sample.mask, sample
    image = read_image(sample.image, channels)
    mask, touched = read_mask(sample.mask)
    if image.shape[:2] != mask.shape:
        raise RequestError(
            f"{sample.image} is {image.shape[1]}×{image.shape[0]} but its mask {sample.mask} is "
            f"{mask.shape[1]}×{mask.shape[0]}; they must have the same size: "
            "replace the wrong one or take the name off the list",
            "size-mismatch",
        )
    return image, mask, touched


class SampleCache:
    """Indexable (image, mask) pairs, decoded and checked.

    Args:
        samples: files to read; both paths of each are set.
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
                self._file.write(self._read_all(title), self.touched, self.empty)
        else:
            for _ in self._read_all(title):
                pass

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return image, uint8 (H, W) or (H, W, 3), and mask, uint8 0 or 1 (H, W)."""
        if self._arrays is not None:
            return self._arrays[index]
        if self._file is not None:
            return self._file[index]
        return read_sample(self.samples[index], self.channels)[:2]

    def _read_all(self, title: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all samples in order; Pillow releases the interpreter lock, so threads help."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # In portions, or decoded images would pile up in memory before a slow disk.
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
        memory = host_memory()
        if memory and need > memory[1] / 2:
            raise RequestError(
                f"{len(self.samples)} decoded images take {need / 1e9:.1f} GB, more than half of "
                f"the {memory[1] / 1e9:.1f} GB of free memory: use --cache disk",
                "too-little-memory",
            )


_DECODING = 2  # part of a disk cache's name: raise it when the same files decode to other pixels


class _DiskCache:
    """One file of pixels for one list of samples; its name is a hash of what it was made from."""

    def __init__(self, samples: list[Sample], channels: int):
        key = hashlib.sha256(f"{_DECODING}|{channels}".encode())
        for sample in samples:
            assert sample.image and sample.mask, sample
            for path in (sample.image, sample.mask):
                require_regular(path)
                state = path.stat()
                key.update(os.fsencode(path.resolve()))
                key.update(f"|{state.st_size}|{state.st_mtime_ns}".encode())
        self._pixels = cache_folder("mshnet") / f"{key.hexdigest()[:24]}.pixels"
        self._table = self._pixels.with_suffix(".json")
        self._map: np.ndarray | None = None
        self._offsets: list[tuple[int, list[int]]] = []

    def complete(self) -> bool:
        """Return whether both files are there; the table is written last."""
        try:
            return self._pixels.stat().st_size == json.loads(self._table.read_text())["bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def notes(self) -> tuple[list[str], list[str]]:
        table = json.loads(self._table.read_text())
        return table["touched"], table["empty"]

    def write(
        self,
        pairs: Iterable[tuple[np.ndarray, np.ndarray]],
        touched: list[str],
        empty: list[str],
    ) -> None:
        """Write pixels, then their table; the lists are complete when all pairs have been read."""
        table: dict = {"offsets": [], "bytes": 0}

        def pixels(file: BinaryIO) -> None:
            for image, mask in pairs:
                table["offsets"].append((table["bytes"], image.shape))
                table["bytes"] += file.write(image.tobytes()) + file.write(mask.tobytes())

        try:
            self._pixels.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._pixels, pixels)
            notes = {"touched": touched, "empty": empty}
            write_atomic(self._table, json.dumps(table | notes))
        except OSError as error:
            raise RequestError(
                f"the disk cache {self._pixels.parent} cannot be written ({error.strerror}); "
                "free some space, set XDG_CACHE_HOME to another disk, or use --cache none",
                "unwritable-cache",
            ) from error

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
        # A pickled memmap would copy all its pixels to each worker.
        return self.__dict__ | {"_map": None, "_offsets": []}


def _decoded_bytes(sample: Sample, channels: int) -> int:
    """Return the size after decoding, from the file's header; 0 where that is unreadable."""
    assert sample.image, sample
    try:
        _, (width, height) = read_header(sample.image)
    except RequestError:
        return 0  # the decoding pass reports it with its name
    return width * height * (channels + 1)
