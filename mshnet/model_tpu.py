"""MSHNet's TPU form: the network of :mod:`mshnet.model`, computed with less memory traffic.

On a TPU a step of MSHNet is bound by memory bandwidth, so the number of times its maps are read and
written decides. Mathematics and parameters are the same, results differ by rounding only, and
operations are chosen by the bytes that the TPU's compiler counts for them (``mshnet aot``):

* Space-to-depth (:mod:`mshnet.space_to_depth`): f columns become channels, so narrow maps fill the
  vector lanes.
* Batch norm and channel attention are one product and one sum for each image and channel. Their
  sums, forward and backward, are computed together, where two layers would each read the map.
* The first convolution of a block and its shortcut share their backward pass.
* Gradients of maxima compare with the maximum, and count in float32 beside other sums.
* Maps are doubled by transposed convolutions (:func:`mshnet.interpolate.double`).

On CPUs and GPUs, which have kernels for the standard layers, this form is slower.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from .batch_norm import BatchNorm2d, remember
from .interpolate import double
from .space_to_depth import (
    columns,
    conv2d,
    fold,
    for_lanes,
    is_peak,
    max_pool,
    mean_and_peak_of_channels,
    padding,
    spread,
    unfold,
    wide,
    without_ignored,
)

if TYPE_CHECKING:  # that module imports this one
    from .model import ChannelAttention, MSHNet, ResidualBlock

LANES = 128  # lanes of a TPU's vector unit


def default_fold(images: int) -> int:
    """Return the default fold (space-to-depth factor) for a per-core batch size.

    128 images fill the lanes by themselves; with fewer, 8 columns of the finest maps do.
    """
    return 1 if images >= LANES else 8


def logits(net: "MSHNet", images: Tensor, heads: int) -> list[Tensor]:
    """Return the logits of the finest heads, finest first.

    Args:
        net: with ``fold`` ≥ 1.
        images: (B, C, H, W).
        heads: number of heads, 1 to 4.

    Returns:
        (B, 1, H/2^i, W/2^i) for head i.
    """
    folds = [max(1, net.fold >> level) for level in range(5)]
    x = conv2d(fold(images, folds[0]), net.conv_init, folds[0])
    maps = []
    for level, encoder in enumerate(net.encoders):
        if level:
            x = max_pool(x, folds[level - 1])
        x = encoder(x)
        maps.append(x)
    for level in (3, 2, 1, 0):
        x = maps[level] = net.decoders[level]([maps[level], double(x, folds[level])])
    return [
        unfold(conv2d(x, head, f), f)
        for x, head, f in zip(maps[:heads], net.heads, folds, strict=False)
    ]


def fused(net: "MSHNet", scales: Tensor) -> Tensor:
    """Apply the fused head: (B, 4, H, W) → (B, 1, H, W)."""
    return unfold(conv2d(fold(scales, net.fold), net.final, net.fold), net.fold)


def residual_block(block: "ResidualBlock", x: Tensor | list[Tensor]) -> Tensor:
    """Apply a :class:`~mshnet.model.ResidualBlock` to folded maps.

    Args:
        block: with a space-to-depth factor f ≥ 1.
        x: (B, C·f, H, W/f), or a list of its parts along the channel axis.
    """
    f, parts = block.fold, x if isinstance(x, list) else [x]
    if block.shortcut is None:
        [x] = parts
        residual = without_ignored(x, block.conv1.in_channels * f)
        x = conv2d(x, block.conv1, f)
    else:
        conv, norm = cast(tuple[nn.Conv2d, BatchNorm2d], tuple(block.shortcut))
        x, residual = _two_convolutions(parts, block.conv1, conv, f)
        residual = _normalized(residual, norm, f)
    x = torch.relu(_normalized(x, block.bn1, f))
    x = _attended(conv2d(x, block.conv2, f), block.bn2, block.ca, f)
    # Folded: one copy for each channel, so that the product below needs no layout change.
    copies = x.shape[1] // f if f > 1 else 1
    attention = torch.sigmoid(conv2d(mean_and_peak_of_channels(x, f), block.sa.conv1, f, copies))
    return torch.relu(attention * x + residual)


def _two_convolutions(
    parts: list[Tensor], one: nn.Conv2d, other: nn.Conv2d, f: int
) -> tuple[Tensor, Tensor]:
    """Apply two convolutions to the same input.

    Args:
        parts: the input's channels, (B, …, H, W/f) each.
        one: (I → O), its kernel at least as large as the other's.
        other: (I → P).

    Returns:
        (B, O·f, H, W/f) and (B, P·f, H, W/f).
    """
    kernels = (for_lanes(layer, f, *parts) for layer in (one, other))
    results = cast(tuple[Tensor, Tensor], _TwoConvolutions.apply(*kernels, *parts))
    biases = (spread(cast(Tensor, layer.bias), f).to(parts[0].dtype) for layer in (one, other))
    x, y = (x + bias.view(-1, 1, 1) for x, bias in zip(results, biases, strict=True))
    return x, y


class _TwoConvolutions(torch.autograd.Function):
    """Two convolutions with one backward convolution, over both results' gradients concatenated.

    The input is read once for the gradients of both kernels, and its own gradient is written once,
    part by part.
    """

    @staticmethod
    def forward(ctx, one: Tensor, other: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(one, other, *parts)
        x = torch.cat(parts, 1)
        return F.conv2d(x, one, padding=padding(one)), F.conv2d(x, other, padding=padding(other))

    @staticmethod
    def backward(ctx, of_one: Tensor, of_other: Tensor) -> tuple[Tensor, ...]:
        one, other, *parts = ctx.saved_tensors
        (high, wide), (low, narrow) = padding(one), padding(other)
        top, left = high - low, wide - narrow
        both = torch.cat([one, F.pad(other, (left, left, top, top))], 0)
        gradient = torch.cat([of_one, of_other], 1)
        x = torch.cat(parts, 1)
        # torch declares the padding as one number; two are what conv2d takes.
        pads = (high, wide)
        kernels = conv2d_weight(x, both.shape, gradient, padding=pads)  # pyright: ignore[reportArgumentType]
        sizes = [part.shape[1] for part in parts]
        inputs = [
            conv2d_input(part.shape, weight.contiguous(), gradient, padding=pads)  # pyright: ignore[reportArgumentType]
            for part, weight in zip(parts, both.split(sizes, 1), strict=True)
        ]
        of_one, of_other = kernels.split([len(one), len(other)])
        height, width = other.shape[2:]
        return of_one, of_other[:, :, top : top + height, left : left + width], *inputs


def _attended(x: Tensor, norm: BatchNorm2d, attention: "ChannelAttention", f: int) -> Tensor:
    """Apply batch norm and channel attention."""
    mean, square = _moments(x, f)
    scale, shift = _scale_and_shift(norm, (mean, square), x)
    # scale·x + shift peaks where x is largest, or smallest if scale (so its weight) is negative.
    sign = norm.weight.detach().sign()
    peak = cast(Tensor, _Peak.apply((x * _pixels(sign, f)).to(x.dtype), f)) * sign
    weights = wide(attention.weights(mean * scale + shift, peak * scale + shift))
    return (x * _pixels(weights * scale, f) + _pixels(weights * shift, f)).to(x.dtype)


def _normalized(x: Tensor, norm: BatchNorm2d, f: int) -> Tensor:
    """Apply batch norm."""
    moments = _moments(x, f) if norm.training else None
    scale, shift = _scale_and_shift(norm, moments, x)
    return (x * _pixels(scale, f) + _pixels(shift, f)).to(x.dtype)


def _moments(x: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """Return mean and mean square of each image's channels, (B, C) each."""
    x = wide(x)
    mean, square = (columns(v.mean((2, 3)), f).mean(2) for v in (x, x * x))
    return mean, square


def _scale_and_shift(
    norm: BatchNorm2d, moments: tuple[Tensor, Tensor] | None, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return batch norm's scale and shift, (C,) each, and update its running statistics.

    Args:
        moments: mean and mean square of each image's channels, (B, C) each; for training.
        x: the map.
    """
    if norm.training and moments:
        mean, square = norm.processes.mean(*(moment.mean(0) for moment in moments))
        # E[x²] - E[x]²: both sums come from one read of the map. For a channel that hardly varies
        # only rounding is left, which may be negative.
        variance = (square - mean * mean).clamp(min=0)
        remember(norm, mean.detach(), variance.detach(), x.numel() / norm.num_features)
    else:
        mean, variance = cast(tuple[Tensor, Tensor], (norm.running_mean, norm.running_var))
    scale = norm.weight * torch.rsqrt(variance + norm.eps)
    return scale, norm.bias - mean * scale


def _pixels(values: Tensor, f: int) -> Tensor:
    """Expand values of channels to all their pixels: (…, C) → (…, C·f, 1, 1)."""
    return spread(values, f)[..., None, None]


class _Peak(torch.autograd.Function):
    """The maximum of each image's channels: (B, C·f, H, W/f) → (B, C)."""

    @staticmethod
    def forward(ctx, x: Tensor, f: int) -> Tensor:
        ctx.f = f
        peak = columns(x.amax((2, 3)), f).amax(2)
        ctx.save_for_backward(x, peak)
        return wide(peak)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x, peak = ctx.saved_tensors
        hit = is_peak(x, _pixels(peak, ctx.f))
        # Pixels that share the maximum share its gradient, like amax.
        count = columns(torch.where(hit, 1.0, 0.0).sum((2, 3)), ctx.f).sum(2)
        share = _pixels(gradient / count.clamp(min=1), ctx.f).to(x.dtype)
        return torch.where(hit, share, torch.zeros_like(share)), None
