"""From decoded samples to batches: fixed shapes, 8 bits, seeded.

Images stay uint8 until they are on the device (``training/step.py`` normalises there): a grey
256×256 sample is 64 KiB instead of 768 KiB as float32 RGB.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .augment import augment, resize
from .store import SampleStore


class TrainingSet(Dataset):
    """Augmented samples, addressed by (epoch, index)."""

    def __init__(self, store: SampleStore, base_size: int, crop_size: int, seed: int):
        self.store = store
        self.base_size = base_size
        self.crop_size = crop_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Image (C, crop, crop) and mask (1, crop, crop), both uint8; the mask is 0 or 1."""
        epoch, index = key
        rng = np.random.default_rng([self.seed, epoch, index])
        image, mask = augment(*self.store[index], self.base_size, self.crop_size, rng)
        return channels_first(image), channels_first(mask)


class EvaluationSet(Dataset):
    """Samples resized to size × size."""

    def __init__(self, store: SampleStore, size: int):
        self.store = store
        self.size = size

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Image (C, size, size) and mask (1, size, size), both uint8; the mask is 0 or 1."""
        image, mask = resize(*self.store[index], self.size)
        return channels_first(image), channels_first(mask)


class EpochSampler(Sampler):
    """Every index once an epoch, in an order that depends on seed and epoch alone.

    Yields (epoch, index), so a worker needs no state of its own to know the epoch.
    """

    def __init__(self, length: int, seed: int):
        self.length = length
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        return ((self.epoch, int(index)) for index in order)


def training_loader(dataset: TrainingSet, batch_size: int, workers: int) -> DataLoader:
    """Shuffled batches of one size; set ``loader.sampler.epoch`` before each epoch.

    The rest that does not fill a batch is dropped (another batch size would be another graph);
    the shuffle makes it another rest each epoch.
    """
    sampler = EpochSampler(len(dataset), dataset.seed)
    return DataLoader(
        dataset, batch_size, sampler=sampler, drop_last=True, **_worker_options(workers)
    )


def evaluation_loader(dataset: EvaluationSet, batch_size: int, workers: int) -> DataLoader:
    """All samples in order; the last batch is filled up with black frames to keep its shape."""

    collate = partial(_collate_filled, batch_size)
    return DataLoader(dataset, batch_size, collate_fn=collate, **_worker_options(workers))


def _collate_filled(batch_size: int, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    blank = tuple(torch.zeros_like(x) for x in samples[0])
    samples = samples + [blank] * (batch_size - len(samples))
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def _worker_options(workers: int) -> dict:
    return {"num_workers": workers, "persistent_workers": workers > 0}


def channels_first(array: np.ndarray) -> Tensor:
    """(H, W) or (H, W, C) → (C, H, W), copied."""
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.array(array, order="C"))  # a copy: Pillow's arrays are read-only
