"""MSHNet: a U-shaped residual network with a prediction head at every scale.

Follows "Infrared Small Target Detection with Scale and Location Sensitivity"
(CVPR 2024, arXiv 2403.19366). Keys and shapes of the state_dict are the official ones, so
official weights load here and ours load there. Two operations are expressed so that XLA
compiles them on every device without a host fallback; their values are the usual ones:
bilinear upsampling as two small matrix products, pooling to 1×1 as ``amax`` and ``mean``.

Maps may be folded, f columns into channels (:mod:`mshnet.fold`); shapes below name f, and f is 1
unless ``MSHNet.fold`` says otherwise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import fold
from .fold import BatchNorm2d, Conv2d

FOLDS = (1, 2, 4, 8, 16)


def _interpolation_matrix(size: int, scale: int, like: Tensor) -> Tensor:
    """Rows of linear-interpolation weights, (size·scale, size), corners aligned.

    Built inside the graph: a compiler folds it to a constant, and there is no cache that could
    hold tensors of another device.
    """
    out = size * scale
    rows = torch.arange(out, device=like.device, dtype=torch.float32)
    columns = torch.arange(size, device=like.device, dtype=torch.float32)
    positions = rows * ((size - 1) / (out - 1))
    weights = (1 - (positions[:, None] - columns[None, :]).abs()).clamp(min=0)
    return weights.to(like.dtype)


def upsample(x: Tensor, scale: int) -> Tensor:
    """Bilinear upsampling with aligned corners: (B, C, H, W) → (B, C, scale·H, scale·W).

    Equal to ``F.interpolate(mode="bilinear", align_corners=True)``, whose backward XLA has no
    lowering for off TPU. Interpolation is linear and separable, so it is ``A @ x @ Bᵀ``. (A TPU
    multiplies float32 matrices in bfloat16 unless told otherwise, here as everywhere.)
    """
    height, width = x.shape[-2:]
    vertical = _interpolation_matrix(height, scale, x)
    horizontal = _interpolation_matrix(width, scale, x)
    return vertical @ (x @ horizontal.T)


class ChannelAttention(nn.Module):
    """One weight in 0..1 for each channel: (B, C·f, H, W/f) → (B, C·f, 1, 1)."""

    fold = 1

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=False)
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, peak = fold.mean_and_peak_of_pixels(x, self.fold)
        weights = torch.sigmoid(self._squeeze(mean) + self._squeeze(peak))
        return fold.spread(weights, self.fold)

    def _squeeze(self, pooled: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(pooled)))


class SpatialAttention(nn.Module):
    """One weight in 0..1 for each pixel: (B, C·f, H, W/f) → (B, 1 or C·f, H, W/f)."""

    fold = 1

    def __init__(self, kernel_size: int = 7):
        super().__init__()
        self.conv1 = Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pooled = fold.mean_and_peak_of_channels(x, self.fold)
        copies = x.shape[1] // self.fold if self.fold > 1 else 1
        return torch.sigmoid(self.conv1(pooled, copies))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, channel then spatial attention, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = Conv2d(in_channels, out_channels, 3, padding=1)
        self.bn1 = BatchNorm2d(out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = BatchNorm2d(out_channels)
        # The shortcut stands before the attentions so that parameters keep the official order.
        self.shortcut = None
        if in_channels != out_channels:
            self.shortcut = nn.Sequential(
                Conv2d(in_channels, out_channels, 1), BatchNorm2d(out_channels)
            )
        self.ca = ChannelAttention(out_channels)
        self.sa = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is None:
            residual = fold.without_ignored(x, self.conv1.in_channels * self.conv1.fold)
        else:
            residual = self.shortcut(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = self.ca(x) * x
        x = self.sa(x) * x
        return torch.relu(x + residual)


def _stage(in_channels: int, out_channels: int, depth: int) -> nn.Sequential:
    blocks = [ResidualBlock(in_channels, out_channels)]
    blocks += [ResidualBlock(out_channels, out_channels) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


class MSHNet(nn.Module):
    """Multi-scale-head U-Net for infrared small targets.

    Args:
        in_channels: channels of the input image; the official weights have 3.
        widths: channels of the five levels, finest first.
        depths: residual blocks of the five levels, finest first; each decoder has as many as
            the encoder of its level.

    The defaults are the official network (4.07 M parameters). Narrower ones are for tests and
    lessons; a block has a shortcut convolution only where its width changes.
    """

    def __init__(
        self,
        in_channels: int = 3,
        widths: Sequence[int] = (16, 32, 64, 128, 256),
        depths: Sequence[int] = (1, 2, 2, 2, 2),
    ):
        super().__init__()
        if len(widths) != 5 or len(depths) != 5:
            raise ValueError(f"MSHNet has five levels, got widths={widths}, depths={depths}")
        w0, w1, w2, w3, w4 = widths
        d0, d1, d2, d3, d4 = depths
        self.conv_init = Conv2d(in_channels, w0, 1)
        self.encoder_0 = _stage(w0, w0, d0)
        self.encoder_1 = _stage(w0, w1, d1)
        self.encoder_2 = _stage(w1, w2, d2)
        self.encoder_3 = _stage(w2, w3, d3)
        self.middle_layer = _stage(w3, w4, d4)
        self.decoder_3 = _stage(w3 + w4, w3, d3)
        self.decoder_2 = _stage(w2 + w3, w2, d2)
        self.decoder_1 = _stage(w1 + w2, w1, d1)
        self.decoder_0 = _stage(w0 + w1, w0, d0)
        self.output_0 = Conv2d(w0, 1, 1)
        self.output_1 = Conv2d(w1, 1, 1)
        self.output_2 = Conv2d(w2, 1, 1)
        self.output_3 = Conv2d(w3, 1, 1)
        self.final = Conv2d(4, 1, 3, padding=1)
        self._folds = (1, 1, 1, 1, 1)

    @property
    def fold(self) -> int:
        """Columns of the finest level that are folded into channels, 1 to 16.

        What a TPU wants with small batches (:mod:`mshnet.fold`); it changes the numbers by no more
        than rounding. The next level has half of it, and so on down to 1.
        """
        return self._folds[0]

    @fold.setter
    def fold(self, columns: int) -> None:
        if columns not in FOLDS:
            raise ValueError(f"fold {columns}: must be one of {', '.join(map(str, FOLDS))}")
        self._folds = tuple(max(1, columns >> level) for level in range(5))
        f0, f1, f2, f3, f4 = self._folds
        for f, parts in (
            (f0, (self.conv_init, self.encoder_0, self.decoder_0, self.output_0, self.final)),
            (f1, (self.encoder_1, self.decoder_1, self.output_1)),
            (f2, (self.encoder_2, self.decoder_2, self.output_2)),
            (f3, (self.encoder_3, self.decoder_3, self.output_3)),
            (f4, (self.middle_layer,)),
        ):
            for part in parts:
                for layer in part.modules():
                    if hasattr(layer, "fold"):
                        layer.fold = f

    def forward(self, images: Tensor, warm_flag: bool) -> tuple[list[Tensor], Tensor]:
        """Logits at every scale and fused.

        Args:
            images: float, (B, in_channels, H, W), H and W divisible by 16.
            warm_flag: False during warm-up (one head), True in the full phase (all heads).

        Returns:
            ``scales, fused``. Full phase: scales are logits at full, half, quarter and eighth
            size, (B, 1, H/2^i, W/2^i), and fused is (B, 1, H, W). Warm-up: scales is empty and
            fused is the full-size head.

        Raises:
            ValueError: height or width is not a multiple of 16.
        """
        height, width = images.shape[-2:]
        if height % 16 or width % 16:
            raise ValueError(
                f"images are {height}×{width}; both sides must be multiples of 16, "
                f"for example {max(16, round(height / 16) * 16)}×{max(16, round(width / 16) * 16)}"
            )
        f0, f1, f2, f3, _ = self._folds
        e0 = self.encoder_0(self.conv_init(fold.fold(images, f0)))
        e1 = self.encoder_1(fold.max_pool(e0, f0))
        e2 = self.encoder_2(fold.max_pool(e1, f1))
        e3 = self.encoder_3(fold.max_pool(e2, f2))
        middle = self.middle_layer(fold.max_pool(e3, f3))

        d3 = self.decoder_3(torch.cat([e3, _double(middle, f3)], 1))
        d2 = self.decoder_2(torch.cat([e2, _double(d3, f2)], 1))
        d1 = self.decoder_1(torch.cat([e1, _double(d2, f1)], 1))
        d0 = self.decoder_0(torch.cat([e0, _double(d1, f0)], 1))

        output_0 = fold.unfold(self.output_0(d0), f0)
        if not warm_flag:
            return [], output_0
        scales = [
            output_0,
            fold.unfold(self.output_1(d1), f1),
            fold.unfold(self.output_2(d2), f2),
            fold.unfold(self.output_3(d3), f3),
        ]
        enlarged = [output_0] + [upsample(scales[i], 2**i) for i in (1, 2, 3)]
        return scales, fold.unfold(self.final(fold.fold(torch.cat(enlarged, 1), f0)), f0)


def _double(x: Tensor, f: int) -> Tensor:
    """Twice the size: a map of the next coarser level → one that is folded by f."""
    # The matrices would need the columns in a row.
    return upsample(x, 2) if f == 1 else fold.double(x, f // 2)
