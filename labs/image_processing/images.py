"""Crop, resize and blur as plain PyTorch functions, and built-in frames to try them on.

They take and give tensors and know nothing of devices: eager PyTorch, torch_xla and torchax run the
same lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mshnet.data.scenes import render_scene

SIZE = (64, 64)  # of a crop after resizing: height, width
SIGMA = 1.0  # of the blur, pixels


@dataclass(frozen=True)
class Box:
    """A rectangle of whole pixels in a frame: rows ``top`` to ``top + height``, columns alike."""

    top: int
    left: int
    height: int
    width: int


def box_of(
    mask: np.ndarray, padding: int = 0, min_size: int = 1, aspect: float | None = None
) -> Box:
    """Return the box around all target pixels of a mask, on the host.

    Padding comes first, then the minimum size, then the aspect ratio, which enlarges the side that
    is too short; the frame comes last: a box that sticks out is moved inside, and what is larger
    than the frame is cut to it, whatever its aspect ratio was.

    Args:
        mask: (H, W), any dtype; target where it is not 0.
        padding: pixels added on each of the four sides.
        min_size: least height and width, pixels.
        aspect: width divided by height, or None for as it comes.

    Raises:
        ValueError: the mask is not two-dimensional or has no target; an argument is out of range.
    """
    mask = np.asarray(mask) != 0
    if mask.ndim != 2:
        raise ValueError(f"the mask has the shape {mask.shape}; it must be (height, width)")
    if not mask.any():
        raise ValueError("the mask has no target pixel, so there is no box: skip this frame")
    if padding < 0 or min_size < 1:
        raise ValueError(f"padding {padding} and min_size {min_size}: at least 0 and 1, please")
    if aspect is not None and not (0 < aspect < math.inf):
        raise ValueError(f"aspect {aspect}: width divided by height, a positive number")
    top, height = _span(mask.any(1), padding, min_size)
    left, width = _span(mask.any(0), padding, min_size)
    if aspect is not None:
        wanted = max(width, math.ceil(height * aspect))
        taller = max(height, math.ceil(width / aspect))
        top, left = top - (taller - height) // 2, left - (wanted - width) // 2
        height, width = taller, wanted
    top, height = _inside(top, height, mask.shape[0])
    left, width = _inside(left, width, mask.shape[1])
    return Box(top, left, height, width)


def _span(hit: np.ndarray, padding: int, min_size: int) -> tuple[int, int]:
    """Return first pixel and length of the target along one axis, padded and enlarged."""
    places = np.flatnonzero(hit)
    first, length = int(places[0]) - padding, int(places[-1] - places[0]) + 1 + 2 * padding
    more = max(min_size - length, 0)
    return first - more // 2, length + more


def _inside(first: int, length: int, side: int) -> tuple[int, int]:
    length = min(length, side)
    return min(max(first, 0), side - length), length


def crop(images: Tensor, box: Box) -> Tensor:
    """Crop by a slice: (B, C, H, W) → (B, C, box.height, box.width), a shape for each box."""
    rows = slice(box.top, box.top + box.height)
    return images[..., rows, box.left : box.left + box.width]


def as_data(boxes: Sequence[Box]) -> Tensor:
    """Return boxes as float32 (B, 4) on the host: top, left, height, width in pixels."""
    return torch.tensor([[box.top, box.left, box.height, box.width] for box in boxes]).float()


def crop_resize(
    images: Tensor, boxes: Tensor, size: tuple[int, int] = SIZE, antialias: bool = True
) -> Tensor:
    """Crop each image by its box and resize the crops to one size.

    The same numbers as :func:`crop` and then bilinear ``F.interpolate(align_corners=False)``, but
    the box is data: no shape depends on it, so a compiled program serves all boxes. Resizing along
    an axis is a product with a matrix of weights, and the box only changes the weights.

    Args:
        images: floating point, (B, C, H, W). The weights are computed in float32 and rounded to
            the images' dtype.
        boxes: float32, (B, 4) or (1, 4) on the images' device; see :func:`as_data`.
        size: height and width of the result, pixels.
        antialias: average over all source pixels that fall on one pixel of a smaller result,
            instead of the two nearest along each axis.

    Returns:
        (B, C, *size), of the images' dtype.

    Raises:
        ValueError: the images are not floating point.
    """
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}: weights are fractions, so call float() first")
    top, left, height, width = boxes.unbind(1)
    rows = weights(top, height, images.shape[-2], size[0], antialias).to(images.dtype)
    columns = weights(left, width, images.shape[-1], size[1], antialias).to(images.dtype)
    return rows[:, None] @ (images @ columns[:, None].transpose(-1, -2))


def weights(first: Tensor, length: Tensor, pixels: int, out: int, antialias: bool) -> Tensor:
    """Return the weights of a frame's pixels in a resized span: float32 (B, out, pixels).

    A triangle around the place in the source where a result's pixel has its centre, one pixel wide
    to both sides, or with ``antialias`` as wide as the result's pixels are. What lies outside of
    the span counts nothing, and the rest is scaled to the sum 1.
    """
    places = torch.arange(out, device=first.device, dtype=torch.float32) + 0.5
    pixel = torch.arange(pixels, device=first.device, dtype=torch.float32)
    first, scale = first[:, None, None], (length / out)[:, None, None]
    centres = first + places[:, None] * scale - 0.5
    distance = (pixel - centres).abs()
    if antialias:
        distance = distance / scale.clamp(min=1)
    inside = (pixel >= first) & (pixel < first + length[:, None, None])
    found = (1 - distance).clamp(min=0) * inside
    return found / found.sum(-1, keepdim=True)


def resize(images: Tensor, size: tuple[int, int], antialias: bool = True) -> Tensor:
    """Resize whole frames, (B, C, H, W) → (B, C, *size); see :func:`crop_resize`."""
    height, width = images.shape[-2:]
    frame = torch.tensor([[0.0, 0.0, height, width]], device=images.device)
    return crop_resize(images, frame, size, antialias)


def gaussian_blur(images: Tensor, sigma: float = SIGMA) -> Tensor:
    """Blur by a Gaussian, cut at 3 sigma, with the frame mirrored at its border.

    Args:
        images: floating point, (B, C, H, W).
        sigma: standard deviation in pixels.

    Raises:
        ValueError: sigma is not positive, or the images are smaller than the Gaussian.
    """
    if not sigma > 0:
        raise ValueError(f"sigma {sigma}: a positive number of pixels, please")
    radius = math.ceil(3 * sigma)
    if radius >= min(images.shape[-2:]):
        raise ValueError(
            f"sigma {sigma} reaches {radius} pixels and the images are {images.shape[-2]}×"
            f"{images.shape[-1]}: mirroring needs sides of at least {radius + 1}"
        )
    away = torch.arange(-radius, radius + 1, device=images.device, dtype=torch.float32)
    weights = torch.exp(-0.5 * (away / sigma) ** 2)
    weights = (weights / weights.sum()).to(images.dtype)
    channels = images.shape[1]
    images = F.pad(images, (radius, radius, radius, radius), mode="reflect")
    for kernel in (weights.view(1, 1, -1, 1), weights.view(1, 1, 1, -1)):
        images = F.conv2d(images, kernel.repeat(channels, 1, 1, 1), groups=channels)
    return images


def process(images: Tensor, boxes: Tensor) -> Tensor:
    """Crop, resize to :data:`SIZE` and blur: (B, C, H, W) → (B, C, *SIZE)."""
    return gaussian_blur(crop_resize(images, boxes))


class Frames(NamedTuple):
    """Images (B, 1, H, W), 0 to 255, and masks (B, 1, H, W), 0 or 1, both float32; B boxes."""

    images: Tensor
    masks: Tensor
    boxes: list[Box]


def frames(count: int, size: int = 128) -> Frames:
    """Return built-in scenes with a box around the targets of each, on the host."""
    scenes = [render_scene(seed=0, index=index, size=size) for index in range(count)]
    images, masks = (torch.from_numpy(np.stack(part))[:, None] for part in zip(*scenes))
    boxes = [box_of(mask, padding=8, min_size=24, aspect=1.0) for _, mask in scenes]
    return Frames(images.float(), (masks > 0).float(), boxes)
