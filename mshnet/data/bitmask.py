"""Masks as bits on their way to the device: an eighth of a byte a pixel."""

import torch
from torch import Tensor


def pack(masks: Tensor) -> Tensor:
    """(B, 1, H, W) of 0 and 1 → uint8 (B, 1, H/8, W), H a multiple of 8.

    Bit k of a byte is the pixel k·H/8 rows below it: unpacked, columns stay where they are, which
    is how a TPU's lanes want them.
    """
    b, _, height, width = masks.shape
    parts = masks.to(torch.bool).view(b, 8, height // 8, width)
    return (parts * _values(masks)).sum(1, keepdim=True, dtype=torch.uint8)


def unpack(bits: Tensor) -> Tensor:
    """The opposite of :func:`pack`, on any device: bool (B, 1, H, W)."""
    b, _, height, width = bits.shape
    return (bits & _values(bits)).to(torch.bool).view(b, 1, 8 * height, width)


def _values(like: Tensor) -> Tensor:
    """Of the eight bits, uint8 (1, 8, 1, 1).

    A power, because ``1 << k`` and ``exp2`` have no lowering for XLA; rounded, because that may
    compute 2**7 by way of logarithms.
    """
    exponents = torch.arange(8, device=like.device, dtype=torch.float32)
    return torch.pow(2, exponents).round().to(torch.uint8).view(1, 8, 1, 1)
