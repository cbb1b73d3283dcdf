"""Columns folded into channels: layers whose maps fill a TPU's lanes, whatever the batch.

A TPU computes on tiles with 128 lanes, and its compiler lays either the channels or the batch of a
map along them. MSHNet's largest maps have 16 channels: with fewer than 128 images in a batch most
of each tile is padding, which is stored, read and written all the same. So here f neighbouring
columns become channels: (B, C, H, W) → (B, C·f, H, W/f), where channel c·f + k holds the columns
k, k + f, k + 2f, … of channel c. With C·f = 128 the tiles are full.

The layers compute what their namesakes compute, on folded maps, with the same parameters: f is an
attribute, not a part of the state_dict, and with f = 1 they are their namesakes. What it costs is
arithmetic: a folded kernel is f times larger, most of it zeros. The step of MSHNet is bound by
memory traffic, so a TPU has that to spare (the GUIDE has the account); CPUs and GPUs do not.
"""

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fold(x: Tensor, f: int) -> Tensor:
    """(B, C, H, W) → (B, C·f, H, W/f)."""
    if f == 1:
        return x
    b, c, h, w = x.shape
    return x.reshape(b, c, h, w // f, f).permute(0, 1, 4, 2, 3).reshape(b, c * f, h, w // f)


def unfold(x: Tensor, f: int) -> Tensor:
    """(B, C·f, H, W/f) → (B, C, H, W)."""
    if f == 1:
        return x
    b, cf, h, g = x.shape
    return x.reshape(b, cf // f, f, h, g).permute(0, 1, 3, 4, 2).reshape(b, cf // f, h, g * f)


def kernel(weight: Tensor, f: int) -> Tensor:
    """The kernel that does on folded maps what this one does on maps.

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
    # Lines of t·f + 1 places, one after the other, cut anew into lines of t·f: each begins one
    # place later in its weights than the one before, so its weights stand one place further on.
    before = reach * f - s // 2
    line = F.pad(weight, (before, t * f + 1 - before - s))
    lines = line.unsqueeze(-2).expand(o, i, r, f, t * f + 1).flatten(-2)[..., : f * t * f]
    return lines.reshape(o, i, r, f, t, f).permute(0, 3, 1, 5, 2, 4).reshape(o * f, i * f, r, t)


class Conv2d(nn.Conv2d):
    """``nn.Conv2d`` on folded maps: stride 1, odd kernel, padding that keeps the size."""

    fold = 1

    def forward(self, x: Tensor, copies: int = 1) -> Tensor:
        """Convolve.

        Args:
            x: (B, I·f, H, W/f); or from :func:`max_pool` (B, I·2f, H, W/f), with every other
                column to be ignored.
            copies: how often to write the result. A product with a map of C channels needs no
                other layout of a factor that is there C times.

        Returns:
            (B, copies·O·f, H, W/f).
        """
        stride = x.shape[1] // (self.in_channels * self.fold)
        if self.fold == stride == 1 == copies:
            return super().forward(x)
        weight = kernel(self.weight.to(x.dtype), self.fold).repeat(copies, 1, 1, 1)
        if stride == 2:
            weight = torch.stack([weight, torch.zeros_like(weight)], 2).flatten(1, 2)
        bias = None
        if self.bias is not None:
            bias = _spread(self.bias, self.fold).repeat(copies).to(x.dtype)
        return F.conv2d(x, weight, bias, padding=(weight.shape[2] // 2, weight.shape[3] // 2))


class BatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` on folded maps: the f columns of a channel have one mean and variance."""

    fold = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.fold == 1:
            return super().forward(x)
        values = x.float()
        if self.training:
            mean = _gather(values.mean((0, 2, 3)), self.fold)
            # The square of the mean from the mean of the squares: one look at the map gives both.
            variance = _gather((values * values).mean((0, 2, 3)), self.fold) - mean * mean
            self._remember(mean, variance, x.numel() / self.num_features)
        else:
            mean, variance = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        scale, shift = (_spread(v, self.fold).view(1, -1, 1, 1) for v in (scale, shift))
        return (values * scale + shift).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)


def mean_and_peak_of_pixels(x: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """Mean and maximum of each channel: (B, C·f, H, W/f) → two of (B, C, 1, 1)."""
    mean, peak = x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    if f > 1:
        mean = mean.unflatten(1, (-1, f)).mean(2)
        peak = peak.unflatten(1, (-1, f)).amax(2)
    return mean, peak


def spread(x: Tensor, f: int) -> Tensor:
    """One value of each channel for all its columns: (B, C, 1, 1) → (B, C·f, 1, 1)."""
    return x if f == 1 else x.unsqueeze(2).expand(-1, -1, f, -1, -1).flatten(1, 2)


def mean_and_peak_of_channels(x: Tensor, f: int) -> Tensor:
    """Mean and maximum of each pixel: (B, C·f, H, W/f) → (B, 2·f, H, W/f), a folded map of two."""
    if f == 1:
        return torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return _MeanAndPeak.apply(x, f)


class _MeanAndPeak(torch.autograd.Function):
    """Reductions over every f-th channel, by operations that keep a map in its lanes.

    A reshape that separates C from f would be a copy of the map into other tiles. A 1×1 convolution
    adds up groups (and hands gradients back to them); the maximum comes of maps that are turned
    around by multiples of f.
    """

    @staticmethod
    def forward(ctx, x: Tensor, f: int) -> Tensor:
        groups = _groups(x, f)
        peak = _peak_everywhere(x, f)
        ctx.save_for_backward(x, peak)
        ctx.f = f
        mean = F.conv2d(x, groups.transpose(0, 1) * (f / x.shape[1]))
        return torch.cat([mean, peak[:, :f]], 1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        x, peak = ctx.saved_tensors
        f, groups = ctx.f, _groups(x, ctx.f)
        hit = (x == peak).to(x.dtype)
        # Channels that share the maximum share its gradient, as amax has it.
        shares = F.conv2d(hit, groups.transpose(0, 1))
        mean, peak = gradient[:, :f] * (f / x.shape[1]), gradient[:, f:] / shares
        nothing = torch.zeros_like(groups)
        both = torch.cat([torch.cat([groups, nothing], 1), torch.cat([nothing, groups], 1)], 0)
        mean, peak = F.conv2d(torch.cat([mean, peak], 1), both).chunk(2, 1)
        return mean + peak * hit, None


def _groups(x: Tensor, f: int) -> Tensor:
    """(C·f, f, 1, 1): 1 where a channel belongs to a column."""
    channel = torch.arange(x.shape[1], device=x.device)[:, None] % f
    column = torch.arange(f, device=x.device)[None]
    return (channel == column).to(x.dtype)[..., None, None]


def _peak_everywhere(x: Tensor, f: int) -> Tensor:
    """The maximum over all channels of a pixel, in each of them: (B, C·f, H, W/f) → the same."""
    channels, step = x.shape[1] // f, f
    while channels > 1:
        # 16 in one pass: a compiler fuses that many, and 128 channels take two.
        group = next((n for n in range(16, 1, -1) if channels % n == 0), channels)
        turned = [torch.roll(x, i * step, 1) for i in range(group)]
        for other in turned[1:]:
            turned[0] = torch.maximum(turned[0], other)
        x, channels, step = turned[0], channels // group, step * group
    return x


def max_pool(x: Tensor, f: int) -> Tensor:
    """2×2 maxima: (B, C·f, H, W/f) → (B, C·f, H/2, W/f), where every other column is to be ignored.

    With f = 1 that is (B, C, H/2, W/2), and nothing is to be ignored.
    """
    if f == 1:
        return F.max_pool2d(x, 2)
    rows = x.unflatten(2, (-1, 2))
    highest = torch.maximum(rows[:, :, :, 0], rows[:, :, :, 1])
    return torch.maximum(highest, torch.roll(highest, -1, 1))  # column k has k + 1's, too


def without_ignored(x: Tensor, channels: int) -> Tensor:
    """What :func:`max_pool` leaves, without the columns to be ignored: channels are all there are.

    For whom a convolution cannot leave them out.
    """
    return x if x.shape[1] == channels else x[:, ::2]


def double(x: Tensor, f: int) -> Tensor:
    """Twice the size, bilinear with aligned corners: (B, C·f, H, W/f) → (B, C·2f, 2H, W/f).

    Along an axis with n places, place 2i of the result is x[i] + i / (2n-1) · (x[i-1] - x[i]), and
    place 2i + 1 is x[i] + (n-1-i) / (2n-1) · (x[i+1] - x[i]): x repeated, and a difference times a
    number that depends on the place. Both are convolutions.
    """
    lanes, h = x.shape[1:3]
    same = torch.eye(lanes, dtype=x.dtype, device=x.device)[..., None, None]
    place = torch.arange(4, device=x.device).view(1, 1, 4, 1)
    repeat = same * ((place == 1) | (place == 2))
    # x[i] is added to places 2i - 1 and 2i + 2, and taken from 2i and 2i + 1.
    differ = same * torch.where((place == 1) | (place == 2), -1.0, 1.0).to(x.dtype)
    rows = _share(h, x).view(1, 1, -1, 1)
    along = {"stride": (2, 1), "padding": (1, 0)}
    x = F.conv_transpose2d(x, repeat, **along) + rows * F.conv_transpose2d(x, differ, **along)

    columns = _share(x.shape[3] * f, x).view(-1, 2 * f).T  # (2f, W/f)
    columns = columns.repeat(lanes // f, 1)[None, :, None]
    repeat, differ = _column_kernels(lanes // f, f, x)
    return F.conv2d(x, repeat) + columns * F.conv2d(x, differ, padding=(0, 1))


def _share(n: int, like: Tensor) -> Tensor:
    """(2n,): the share that the neighbour's value has in each place of a doubled axis."""
    place = torch.arange(2 * n, device=like.device)
    i = place // 2
    return (torch.where(place % 2 == 0, i, n - 1 - i) / (2 * n - 1)).to(like.dtype)


def _column_kernels(channels: int, f: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels (C·2f, C·f, 1, 1 or 3) that repeat columns, and take them from their neighbours."""
    same = torch.eye(channels, dtype=like.dtype, device=like.device).view(channels, 1, channels, 1)
    side = torch.arange(2, device=like.device).view(1, 2, 1, 1)  # of the two places of a column
    at = torch.arange(-1, 2, device=like.device).view(1, 1, 1, 3)
    neighbour = (at == 2 * side - 1).to(like.dtype)
    here = (at == 0).to(like.dtype)

    def folded(pair: Tensor) -> Tensor:
        lines = kernel((same * pair).flatten(0, 1)[:, :, None], f)  # channel (c, side, column)
        return lines.unflatten(0, (channels, 2, f)).transpose(1, 2).flatten(0, 2)

    repeat = folded(here[..., 1:2] * torch.ones_like(neighbour[..., :1]))
    return repeat, folded(neighbour - here)


def _spread(values: Tensor, f: int) -> Tensor:
    """(C,) → (C·f,)."""
    return values.unsqueeze(1).expand(-1, f).flatten()


def _gather(values: Tensor, f: int) -> Tensor:
    """The mean of each channel's columns: (C·f,) → (C,)."""
    return values.unflatten(0, (-1, f)).mean(1)
