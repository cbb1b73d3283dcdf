"""Whole frames through a generator of fixed size: overlapping tiles, blended.

XLA compiles a program for every shape, so a frame of any size is cut into tiles of one size, and
the last batch is filled up. Two things would show where tiles meet: pixels near a tile's border are
computed without their real neighbours, and two tiles need not agree. So a tile's outer ``margin``
is never used, and the next ``blend`` pixels fade from one tile into the other.

Where the generator looks no further than ``margin`` pixels, the result is that of the whole frame,
to rounding. Where it looks further, what is left of the difference is faded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mshnet.training.backend import Backend
from tpuscope.errors import RequestError

from .networks import Generator

Enlarge = Callable[[Tensor], Tensor]  # float32 (B, 1, T, T) → (B, 1, s·T, s·T), on the host


@dataclass(frozen=True)
class Tiling:
    """Geometry of the tiles; lengths in pixels of low resolution.

    Attributes:
        tile: side of a tile.
        margin: at each of its borders, not used.
        blend: beside the margin, shared with the neighbour.
        batch: tiles at a time.

    Raises:
        RequestError: nothing of a tile would be left.
    """

    tile: int = 64
    margin: int = 8
    blend: int = 8
    batch: int = 4

    def __post_init__(self):
        if self.margin < 0 or self.blend < 0 or self.batch < 1:
            raise RequestError(f"{self}: margin and blend must not be negative, batch at least 1")
        least = 2 * (self.margin + self.blend) + 1
        if self.tile < least:
            raise RequestError(
                f"--tile {self.tile} is too small for {self.margin} pixels of margin and "
                f"{self.blend} of blending at each border; use at least {least}"
            )

    @property
    def stride(self) -> int:
        """Distance from one tile to the next, pixels."""
        return self.tile - 2 * self.margin - self.blend

    def count(self, length: int) -> int:
        """Return the number of tiles along an axis."""
        return max(1, -(-(length - self.blend) // self.stride))


def upscale(frame: np.ndarray, enlarge: Enlarge, scale: int, tiling: Tiling) -> np.ndarray:
    """Enlarge a whole frame of any size from 1×1: float32 (H, W) → (s·H, s·W).

    Args:
        frame: in the generator's units.
        enlarge: called with batches of one shape only, ``(tiling.batch, 1, tile, tile)``.
        scale: s, of ``enlarge``.
        tiling: how to cut.
    """
    t, m = tiling.tile, tiling.margin
    grid = [tiling.count(side) for side in frame.shape]
    # Border pixels are repeated, so that every tile is full and every real pixel within a margin.
    whole = [2 * m + n * tiling.stride + tiling.blend for n in grid]
    fill = [(m, all_ - m - side) for all_, side in zip(whole, frame.shape, strict=True)]
    padded = np.pad(frame.astype(np.float32), fill, mode="edge")
    window = _window(tiling, scale)
    total = np.zeros([side * scale for side in whole], np.float32)
    weight = np.zeros_like(total)
    corners = [(i * tiling.stride, j * tiling.stride) for i, j in np.ndindex(*grid)]
    for y, x, made in _enlarged(padded, corners, enlarge, tiling):
        place = np.s_[y * scale : (y + t) * scale, x * scale : (x + t) * scale]
        total[place] += made * window
        weight[place] += window
    inside = tuple(slice(m * scale, (m + side) * scale) for side in frame.shape)
    return total[inside] / weight[inside]


def _enlarged(
    padded: np.ndarray, corners: list[tuple[int, int]], enlarge: Enlarge, tiling: Tiling
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield corner and enlarged tile, for all corners."""
    t = tiling.tile
    for first in range(0, len(corners), tiling.batch):
        some = corners[first : first + tiling.batch]
        batch = torch.zeros(tiling.batch, 1, t, t)
        for slot, (y, x) in enumerate(some):
            batch[slot, 0] = torch.from_numpy(padded[y : y + t, x : x + t])
        made = enlarge(batch)
        for (y, x), tile in zip(some, made[: len(some), 0].numpy(), strict=True):
            yield y, x, tile


def _window(tiling: Tiling, scale: int) -> np.ndarray:
    """Return a tile's blending weights, float32 (s·T, s·T): 0 in the margin, then rising to 1."""
    rise = (np.arange(tiling.blend * scale) + 0.5) / max(1, tiling.blend * scale)
    flat = np.ones((tiling.tile - 2 * tiling.margin - 2 * tiling.blend) * scale)
    zero = np.zeros(tiling.margin * scale)
    profile = np.concatenate([zero, rise, flat, rise[::-1], zero]).astype(np.float32)
    return np.outer(profile, profile)


class Upscaler:
    """Enlarges frames with a generator on a device: ``Upscaler(generator, backend)(frame)``.

    Args:
        generator: on the host, in evaluation mode; it is moved.
        backend: the device.
        tiling: how frames are cut.
    """

    def __init__(self, generator: Generator, backend: Backend, tiling: Tiling | None = None):
        self.scale = generator.scale
        self.tiling = tiling or Tiling()
        self._backend = backend
        backend.move(generator)

        @torch.no_grad()
        def step(tiles: Tensor) -> tuple[Tensor]:
            return (backend.replicate_output(generator(tiles)),)

        self._step = backend.compile_step(step, [*generator.parameters(), *generator.buffers()])

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        """uint8 (H, W) → uint8 (s·H, s·W)."""
        made = upscale(frame / np.float32(255), self._enlarge, self.scale, self.tiling)
        return np.rint(np.clip(made, 0, 1) * 255).astype(np.uint8)

    def _enlarge(self, tiles: Tensor) -> Tensor:
        [made] = self._step(self._backend.to_device(tiles))
        return made.cpu()
