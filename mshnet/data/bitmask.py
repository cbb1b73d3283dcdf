"""Masks as bits for the transfer to the device: an eighth of a byte a pixel."""

import torch
from torch import Tensor


def pack(masks: Tensor) -> Tensor:
    """Pack masks of 0 and 1, (B, 1, H, W), into uint8 (B, 1, H/8, W); H is a multiple of 8.

    Bit k of a byte is the pixel k·H/8 rows below it. So unpacking moves no column, and columns are
    what a TPU keeps in its lanes.
    """
    b, _, height, width = masks.shape
    parts = masks.to(torch.bool).view(b, 8, height // 8, width)
    return (parts * _values(masks)).sum(1, keepdim=True, dtype=torch.uint8)


def unpack(bits: Tensor) -> Tensor:
    """Unpack the bits of :func:`pack`, on any device, into bool (B, 1, H, W)."""
    b, _, height, width = bits.shape
    return (bits & _values(bits)).to(torch.bool).view(b, 1, 8 * height, width)


def _values(like: Tensor) -> Tensor:
    """Return the values of the eight bits, uint8 (1, 8, 1, 1).

    ``pow`` is used because ``1 << k`` and ``exp2`` have no lowering for XLA, and its result is
    rounded because XLA may compute 2**7 through logarithms.
    """
    exponents = torch.arange(8, device=like.device, dtype=torch.float32)
    return torch.pow(2, exponents).round().to(torch.uint8).view(1, 8, 1, 1)
