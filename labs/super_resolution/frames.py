"""Infrared frames: built-in scenes or a data set's, shrunk as a coarser sensor would see them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from mshnet.data import augment, source
from mshnet.data.loader import WHOLE_BATCH, DataShard
from mshnet.data.scenes import render_scene
from tpuscope.progress import progress

TEST_START = 1_000_000  # index of the first built-in test scene, as in mshnet.data.scenes


class Pairs(list):
    """Frames and masks of 0 and 1, uint8 (H, W) each, in the data sets' form."""

    channels = 1


def pairs(dataset_dir: str | None, split: str, size: int, count: int | None = None) -> Pairs:
    """Return frames and masks of a split, size × size.

    Args:
        dataset_dir: folder in the project's layout; None renders built-in scenes.
        split: ``"train"`` or ``"test"``.
        size: pixels; images of a data set are resized, scenes are drawn so.
        count: how many at most; built-in scenes are 200 and 50 unless given.

    Raises:
        RequestError: the data set cannot be used.
    """
    if dataset_dir:
        store = source.open_split(dataset_dir, split, channels=1, cache="none")
        chosen = range(min(count or len(store), len(store)))
        return Pairs(augment.resize(*store[i], size) for i in chosen)
    count = count or (source.TRAIN_SCENES if split == "train" else source.TEST_SCENES)
    first = TEST_START if split == "test" else 0
    numbers = progress(range(first, first + count), f"{split} scenes")
    scenes = (render_scene(0, number, size) for number in numbers)
    return Pairs((image, (mask != 0).astype(np.uint8)) for image, mask in scenes)


def shrink(frames: Tensor, scale: int) -> Tensor:
    """Simulate a sensor with s times wider pixels: (B, 1, H, W) → (B, 1, H/s, W/s).

    Each pixel is the mean of s × s and is rounded to 8 bits again: a detector integrates over its
    area. (The paper shrinks photographs by bicubic interpolation.) Float32 in 0..1, both.
    """
    return torch.round(F.avg_pool2d(frames * 255, scale)) / 255


def shrunk(frame: np.ndarray, scale: int) -> np.ndarray:
    """Apply :func:`shrink` to one frame on the host, uint8 (H, W); crop to a multiple of s."""
    rows, columns = (side // scale for side in frame.shape)
    whole = frame[: rows * scale, : columns * scale].astype(np.float32)
    return np.rint(whole.reshape(rows, scale, columns, scale).mean((1, 3))).astype(np.uint8)


class Crops(Dataset):
    """Random crops of high resolution, addressed by (step, slot): the same in every run."""

    def __init__(self, frames: Sequence[np.ndarray], size: int, seed: int):
        self.frames = frames
        self.size = size
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        """Return a crop, uint8 (1, size, size), flipped and rotated at random."""
        rng = np.random.default_rng([self.seed, *key])
        frame = self.frames[rng.integers(len(self.frames))]
        top, left = (rng.integers(side - self.size + 1) for side in frame.shape)
        crop = frame[top : top + self.size, left : left + self.size]
        crop = np.rot90(crop[:, ::-1] if rng.random() < 0.5 else crop, rng.integers(4))
        return torch.from_numpy(crop.copy())[None]


class Steps(Sampler):
    """Sample keys of each step's batch, for this process's shard."""

    def __init__(self, start: int, stop: int, batch_size: int, part: DataShard):
        self.steps = range(start, stop)
        size = part.size(batch_size)
        self.slots = range(part.index * size, (part.index + 1) * size)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            yield [(step, slot) for slot in self.slots]


def crop_loader(
    crops: Crops, start: int, stop: int, batch_size: int, part: DataShard = WHOLE_BATCH
) -> DataLoader:
    """Load steps ``start`` to ``stop``: lists of one tensor, uint8 (B, 1, size, size)."""
    return DataLoader(
        crops, batch_sampler=Steps(start, stop, batch_size, part), collate_fn=_collate
    )


def _collate(crops: list[Tensor]) -> list[Tensor]:
    return [torch.stack(crops)]
