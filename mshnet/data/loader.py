"""From decoded samples to batches: fixed shapes, 8 bits, seeded.

Images stay uint8 until they are on the device (``training/step.py`` normalises there), and masks
are bits: a grey 256×256 sample and its mask are 72 KiB instead of 1 MiB as float32 RGB and float32.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from tpuscope import torchrun

from .augment import augment, resize
from .bitmask import pack
from .sample_cache import SampleCache

BLANK = -1  # index of a black frame; such frames fill up the last batch of an evaluation


@dataclass(frozen=True)
class DataShard:
    """One of ``count`` equal slices of every global batch.

    Slice ``index`` holds rows ``index * size`` to ``(index + 1) * size``. So global batch k has the
    same samples, however many hosts or replicas load it.
    """

    index: int = 0
    count: int = 1

    def size(self, batch_size: int) -> int:
        """Return the samples of this slice; ``count`` must divide the global batch size."""
        assert batch_size % self.count == 0, (batch_size, self.count)
        return batch_size // self.count


WHOLE_BATCH = DataShard()


class TrainingSet(Dataset):
    """Augmented samples, addressed by (epoch, index)."""

    def __init__(self, store: SampleCache, base_size: int, crop_size: int, seed: int):
        self.store = store
        self.base_size = base_size
        self.crop_size = crop_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return image (C, crop, crop) and mask (1, crop, crop), both uint8; the mask is 0 or 1."""
        epoch, index = key
        rng = np.random.default_rng([self.seed, epoch, index])
        image, mask = augment(*self.store[index], self.base_size, self.crop_size, rng)
        return channels_first(image), channels_first(mask)


class EvaluationSet(Dataset):
    """Samples resized to size × size; :data:`BLANK` addresses a black frame without target."""

    def __init__(self, store: SampleCache, size: int):
        self.store = store
        self.size = size

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return image (C, size, size) and mask (1, size, size), both uint8; the mask is 0 or 1."""
        if index == BLANK:
            shape = (self.size, self.size)
            return (
                torch.zeros((self.store.channels, *shape), dtype=torch.uint8),
                torch.zeros((1, *shape), dtype=torch.uint8),
            )
        image, mask = resize(*self.store[index], self.size)
        return channels_first(image), channels_first(mask)


class EpochBatches(Sampler):
    """Shuffled batches: every index at most once an epoch, in an order set by seed and epoch alone.

    Yields lists of (epoch, index), each one process's slice of a global batch; with the epoch in
    the key a worker needs no state. The remainder that does not fill a global batch is dropped
    (another batch size would compile another graph); each epoch's shuffle drops other samples.

    Attributes:
        epoch: set it before each epoch.
        start: global batches to skip, for an epoch that was interrupted.
    """

    def __init__(self, length: int, batch_size: int, seed: int, part: DataShard):
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.part = part
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.length // self.batch_size - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        size = self.part.size(self.batch_size)
        for batch in range(self.start, self.length // self.batch_size):
            first = batch * self.batch_size + self.part.index * size
            yield [(self.epoch, int(index)) for index in order[first : first + size]]


class FilledBatches(Sampler):
    """All indices in order; the last global batch is filled up with :data:`BLANK`."""

    def __init__(self, length: int, batch_size: int, part: DataShard):
        self.length = length
        self.batch_size = batch_size
        self.part = part

    def __len__(self) -> int:
        return -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        size = self.part.size(self.batch_size)
        for batch in range(len(self)):
            first = batch * self.batch_size + self.part.index * size
            yield [i if i < self.length else BLANK for i in range(first, first + size)]


def training_loader(
    dataset: TrainingSet, batch_size: int, workers: int, part: DataShard = WHOLE_BATCH
) -> DataLoader:
    """Return a loader of shuffled batches; set ``loader.batch_sampler.epoch`` before each epoch.

    A batch is images, uint8 (B, C, crop, crop), and masks packed by
    :func:`~mshnet.data.bitmask.pack`, uint8 (B, 1, crop/8, crop).

    Args:
        batch_size: samples of a global batch.
        workers: loader processes; 0 loads in this one.
        part: slice of each global batch that this process loads.
    """
    batches = EpochBatches(len(dataset), batch_size, dataset.seed, part)
    return DataLoader(dataset, batch_sampler=batches, **_worker_options(workers))


def evaluation_loader(
    dataset: EvaluationSet, batch_size: int, workers: int, part: DataShard = WHOLE_BATCH
) -> DataLoader:
    """Return a loader of all samples in order, in batches as of :func:`training_loader`.

    The last batch is filled up with black frames to keep its shape.
    """
    batches = FilledBatches(len(dataset), batch_size, part)
    return DataLoader(dataset, batch_sampler=batches, **_worker_options(workers))


def _worker_options(workers: int) -> dict:
    return {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "worker_init_fn": _leave_signals_to_the_trainer,
        "collate_fn": _collate,
    }


def _collate(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    images, masks = default_collate(samples)
    return [images, pack(masks)]


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Reset the signal handlers that a worker inherits; Ctrl-C reaches the whole group.

    torchrun sends SIGTERM to the whole group, too: a worker leaves it, so that it serves the
    trainer until that has saved. It notices by itself when the trainer has ended.
    """
    if torchrun.launch():
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def channels_first(array: np.ndarray) -> Tensor:
    """Copy (H, W) or (H, W, C) into a tensor (C, H, W)."""
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: Pillow's arrays are read-only
