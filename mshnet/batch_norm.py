"""Batch norm for channels-last maps on a CPU, with accurate sums.

For that layout PyTorch's own kernel (2.9) accumulates all pixels of a channel in one float32. In a
step of MSHNet (8 images of SIRST, 256×256) the gradient's rounding error was 6 %, where the kernel
for the usual layout has 0.1 %. This module uses ``torch.sum``, which sums pairwise; the time is the
same.
"""

from typing import cast

import torch
from torch import Tensor, nn


def batch_norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Return ``layer(x)``, (B, C, H, W); running statistics are updated like the layer's."""
    innermost = x.is_contiguous(memory_format=torch.channels_last)
    if not (layer.training and innermost and x.device.type == "cpu" and x.dtype == torch.float32):
        return layer(x)
    results = _BatchNorm.apply(x, layer.weight, layer.bias, layer.eps)
    result, mean, variance = cast(tuple[Tensor, Tensor, Tensor], results)
    remember(layer, mean, variance, x.numel() / layer.num_features)
    return result


@torch.no_grad()
def remember(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: float) -> None:
    """Update running statistics by a batch's mean and variance, (C,) each, of ``count`` values."""
    assert layer.num_batches_tracked is not None and layer.momentum is not None
    assert layer.running_mean is not None and layer.running_var is not None
    layer.num_batches_tracked.add_(1)
    layer.running_mean.lerp_(mean, layer.momentum)
    layer.running_var.lerp_(variance * (count / (count - 1)), layer.momentum)


class _BatchNorm(torch.autograd.Function):
    """(B, C, H, W) → the same, normalised, with the batch's mean and variance, (C,) each."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = x.numel() / len(weight)
        mean = _sum(x) / count
        centred = x - mean
        variance = _sum(centred * centred) / count
        deviation = torch.rsqrt(variance + eps)
        ctx.save_for_backward(centred, deviation, weight)
        mean, variance = mean.flatten(), variance.flatten()
        ctx.mark_non_differentiable(mean, variance)
        scale = deviation * _of_channels(weight)
        return torch.addcmul(_of_channels(bias), centred, scale), mean, variance

    @staticmethod
    def backward(ctx, gradient: Tensor, *_) -> tuple[Tensor, Tensor, Tensor, None]:
        centred, deviation, weight = ctx.saved_tensors
        count = centred.numel() / len(weight)
        of_bias = _sum(gradient)
        of_weight = _sum(gradient * centred) * deviation
        scale = deviation * _of_channels(weight)
        of_x = torch.addcmul(-of_bias * scale / count, gradient, scale)
        of_x.addcmul_(centred, -of_weight * deviation * scale / count)
        return of_x, of_weight.flatten(), of_bias.flatten(), None


def _sum(x: Tensor) -> Tensor:
    """Sum over images and pixels: (B, C, H, W) → (1, C, 1, 1).

    Image by image, which is six times as fast with few channels.
    """
    return x.sum((2, 3), keepdim=True).sum(0, keepdim=True)


def _of_channels(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
