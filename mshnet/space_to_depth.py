"""Space-to-depth along rows: columns become channels, so that maps fill a TPU's vector lanes.

A TPU computes on tiles with 128 lanes, and its compiler lays either the channels or the batch of a
map along them. MSHNet's largest maps have 16 channels: with fewer than 128 images in a batch most
of each tile is padding, which is stored, read and written like data. So f neighbouring columns
become channels: (B, C, H, W) → (B, C·f, H, W/f), where channel c·f + k holds the columns
k, k + f, k + 2f, … of channel c. With C·f = 128 the tiles are full.

The cost is arithmetic: a folded kernel is f times larger, most of it zeros. MSHNet's step is bound
by memory bandwidth, so a TPU has arithmetic to spare (GUIDE.md has the numbers); CPUs and GPUs have
not. f = 1 folds nothing.
"""

from math import ceil
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fold(x: Tensor, f: int) -> Tensor:
    """Move groups of f columns into channels: (B, C, H, W) → (B, C·f, H, W/f)."""
    if f == 1:
        return x
    b, c, h, w = x.shape
    return x.reshape(b, c, h, w // f, f).permute(0, 1, 4, 2, 3).reshape(b, c * f, h, w // f)


def unfold(x: Tensor, f: int) -> Tensor:
    """Undo :func:`fold`: (B, C·f, H, W/f) → (B, C, H, W)."""
    if f == 1:
        return x
    b, cf, h, g = x.shape
    return x.reshape(b, cf // f, f, h, g).permute(0, 1, 3, 4, 2).reshape(b, cf // f, h, g * f)


def kernel(weight: Tensor, f: int) -> Tensor:
    """Return the kernel that acts on folded maps as the given one acts on maps.

    Args:
        weight: (O, I, R, S) with S odd, centred.

    Returns:
        (O·f, I·f, R, T), T = 2·ceil((S - 1) / 2 / f) + 1: row k of each group of f is the same
        line of weights, shifted by k.
    """
    if f == 1:
        return weight
    o, i, r, s = weight.shape
    reach = ceil((s // 2) / f)
    t = 2 * reach + 1
    # f copies of a line of t·f + 1 places, concatenated and split into lines of t·f places: the
    # weights of each line are shifted by one place against the line before.
    before = reach * f - s // 2
    line = F.pad(weight, (before, t * f + 1 - before - s))
    lines = line.unsqueeze(-2).expand(o, i, r, f, t * f + 1).flatten(-2)[..., : f * t * f]
    return lines.reshape(o, i, r, f, t, f).permute(0, 3, 1, 5, 2, 4).reshape(o * f, i * f, r, t)


def conv2d(x: Tensor, layer: nn.Conv2d, f: int, copies: int = 1) -> Tensor:
    """Apply a convolution (stride 1, odd kernel, same padding) to folded maps.

    Args:
        x: (B, I·f, H, W/f); or the output of :func:`max_pool`, with columns to be ignored.
        copies: how often to repeat the result along channels. A product with a map of C channels
            needs no layout change if the other factor has C copies.

    Returns:
        (B, copies·O·f, H, W/f).
    """
    weight = for_lanes(layer, f, x).repeat(copies, 1, 1, 1)
    bias = None if layer.bias is None else spread(layer.bias, f).repeat(copies).to(x.dtype)
    return F.conv2d(x, weight, bias, padding=padding(weight))


def for_lanes(layer: nn.Conv2d, f: int, *parts: Tensor) -> Tensor:
    """Return a layer's kernel for folded maps, in the dtype of its input's parts."""
    weight = kernel(layer.weight.to(parts[0].dtype), f)
    if sum(part.shape[1] for part in parts) == 2 * weight.shape[1]:  # the output of max_pool
        weight = torch.stack([weight, torch.zeros_like(weight)], 2).flatten(1, 2)
    return weight


def padding(weight: Tensor) -> tuple[int, int]:
    """Return the padding that keeps a map's size."""
    return weight.shape[2] // 2, weight.shape[3] // 2


def spread(values: Tensor, f: int) -> Tensor:
    """Repeat each channel's value for all its columns: (…, C) → (…, C·f)."""
    return values if f == 1 else values.unsqueeze(-1).expand(*values.shape, f).flatten(-2)


def columns(values: Tensor, f: int) -> Tensor:
    """Split folded channels into channels and columns: (…, C·f) → (…, C, f)."""
    return values.unflatten(-1, (-1, f))


def max_pool(x: Tensor, f: int) -> Tensor:
    """Max-pool 2×2: (B, C·f, H, W/f) → (B, C·f, H/2, W/f), with every other column to be ignored.

    With f = 1 the result is (B, C, H/2, W/2), without such columns.
    """
    if f == 1:
        return F.max_pool2d(x, 2)
    rows = x.unflatten(2, (-1, 2))
    highest = torch.maximum(rows[:, :, :, 0], rows[:, :, :, 1])
    return torch.maximum(highest, torch.roll(highest, -1, 1))  # column k has k + 1's, too


def without_ignored(x: Tensor, channels: int) -> Tensor:
    """Drop the columns of :func:`max_pool`'s output that are to be ignored, if x has any.

    For users other than convolutions, which skip them by zero weights.
    """
    return x if x.shape[1] == channels else x[:, ::2]


def wide(x: Tensor) -> Tensor:
    """Convert to float32, or keep a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_peak(x: Tensor, peak: Tensor) -> Tensor:
    """Return where x equals its maximum, up to rounding: bool, the shape of x.

    Args:
        x: a map, floating point.
        peak: its maxima, of a shape that broadcasts to it.

    Not ``x == peak``: a compiler may recompute x inside a fusion, with other rounding. If no
    element is equal, a gradient divided by their count is NaN (seen with XLA on the CPU and
    ``--xla_backend_optimization_level=0``).
    """
    eps = torch.finfo(x.dtype).eps
    # x may be a difference of large numbers, whose rounding exceeds its own last digit.
    rounding = eps if x.dtype in (torch.bfloat16, torch.float16) else eps**0.75
    return x >= peak - peak.abs() * rounding


def mean_and_peak_of_channels(x: Tensor, f: int) -> Tensor:
    """Return mean and maximum over channels: (B, C·f, H, W/f) → (B, 2·f, H, W/f), folded."""
    return cast(Tensor, _MeanAndPeak.apply(x, f))


class _MeanAndPeak(torch.autograd.Function):
    """Reductions over every f-th channel, by operations that keep the map's tile layout.

    A reshape that separates C from f would copy the map into other tiles. A 1×1 convolution sums
    groups (and distributes gradients to them); the maximum is taken over maps rolled by multiples
    of f.
    """

    @staticmethod
    def forward(ctx, x: Tensor, f: int) -> Tensor:
        ctx.f = f
        if f == 1:
            mean, peak = x.mean(1, keepdim=True), x.amax(1, keepdim=True)
        else:
            mean = F.conv2d(x, _groups(x, f).transpose(0, 1) * (f / x.shape[1]))
            peak = _peak_everywhere(x, f)
        ctx.save_for_backward(x, peak)
        return torch.cat([mean, peak[:, :f]], 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x, peak = ctx.saved_tensors
        f = ctx.f
        hit = is_peak(x, peak).to(x.dtype)
        # Channels that share the maximum share its gradient, like amax.
        if f == 1:
            mean = gradient[:, :1] * (1 / x.shape[1])
            count = wide(hit).sum(1, keepdim=True)
            peak = gradient[:, 1:] / count.clamp(min=1).to(x.dtype)
            return mean + peak * hit, None
        groups = _groups(x, f)
        shares = F.conv2d(hit, groups.transpose(0, 1)).clamp(min=1)
        mean, peak = gradient[:, :f] * (f / x.shape[1]), gradient[:, f:] / shares
        nothing = torch.zeros_like(groups)
        both = torch.cat([torch.cat([groups, nothing], 1), torch.cat([nothing, groups], 1)], 0)
        mean, peak = F.conv2d(torch.cat([mean, peak], 1), both).chunk(2, 1)
        return mean + peak * hit, None


def _groups(x: Tensor, f: int) -> Tensor:
    """Return (C·f, f, 1, 1): 1 where a channel belongs to a column, else 0."""
    channel = torch.arange(x.shape[1], device=x.device)[:, None] % f
    column = torch.arange(f, device=x.device)[None]
    return (channel == column).to(x.dtype)[..., None, None]


def _peak_everywhere(x: Tensor, f: int) -> Tensor:
    """Return each pixel's maximum over channels, in all of them: (B, C·f, H, W/f) → the same."""
    channels, step = x.shape[1] // f, f
    while channels > 1:
        # 16 in one pass: a compiler fuses that many, and 128 channels take two.
        group = next((n for n in range(16, 1, -1) if channels % n == 0), channels)
        turned = [torch.roll(x, i * step, 1) for i in range(group)]
        for other in turned[1:]:
            turned[0] = torch.maximum(turned[0], other)
        x, channels, step = turned[0], channels // group, step * group
    return x
