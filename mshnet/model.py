"""MSHNet: a U-shaped residual network with a prediction head at every scale.

Follows "Infrared Small Target Detection with Scale and Location Sensitivity"
(CVPR 2024, arXiv 2403.19366). Keys and shapes of the state_dict are the official ones, so
official weights load here and ours load there.

This is the textbook form, built from layers that CPUs and GPUs have kernels for;
:mod:`mshnet.model_tpu` computes the same network, on the same parameters, in a form for TPUs.
Besides the convolutions, a step's time is memory traffic, so maps are read and written as rarely
as these layers allow: a mean is a sum divided afterwards (the gradient of ``mean`` divides at every
pixel), and the last product and sum of a block are one operation.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import model_tpu
from .batch_norm import BatchNorm2d, batch_norm
from .choices import FOLDS
from .interpolate import upsample


class ChannelAttention(nn.Module):
    """Weights in 0..1 for each channel: (B, C, H, W) → (B, C, 1, 1)."""

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=False)
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        return self.weights(x.sum((2, 3)) / (height * width), _peak(x))[..., None, None]

    def weights(self, mean: Tensor, peak: Tensor) -> Tensor:
        """Return the weights (B, C) from the channels' means and maxima, (B, C) each."""
        return torch.sigmoid(self._squeeze(mean) + self._squeeze(peak))

    def _squeeze(self, pooled: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(pooled[..., None, None])))[:, :, 0, 0]


def _peak(x: Tensor) -> Tensor:
    """Return the largest value of each map: (B, C, H, W) → (B, C).

    On a CPU the gradient goes to one pixel, by a fast kernel. ``amax`` reads all pixels again in
    the backward pass, but XLA lowers it on every device, and on CUDA it is deterministic.
    """
    return F.adaptive_max_pool2d(x, 1).flatten(1) if x.device.type == "cpu" else x.amax((2, 3))


class SpatialAttention(nn.Module):
    """Weights in 0..1 for each pixel: (B, C, H, W) → (B, 1, H, W)."""

    def __init__(self, kernel_size: int = 7):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(1, keepdim=True) / x.shape[1]
        pooled = torch.cat([mean, x.amax(1, keepdim=True)], 1)
        return torch.sigmoid(self.conv1(pooled))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, channel then spatial attention, and a shortcut."""

    fold = 0  # see MSHNet.fold

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.bn1 = BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = BatchNorm2d(out_channels)
        # The shortcut is made before the attentions: parameters keep the official order.
        self.shortcut = None
        if in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1), BatchNorm2d(out_channels)
            )
        self.ca = ChannelAttention(out_channels)
        self.sa = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        if self.fold:
            return model_tpu.residual_block(self, x)
        residual = x
        if self.shortcut is not None:
            residual = batch_norm(cast(BatchNorm2d, self.shortcut[1]), self.shortcut[0](x))
        x = torch.relu_(batch_norm(self.bn1, self.conv1(x)))
        x = batch_norm(self.bn2, self.conv2(x))
        x = self.ca(x) * x
        return torch.relu_(torch.addcmul(residual, self.sa(x), x))


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
        self.conv_init = nn.Conv2d(in_channels, w0, 1)
        self.encoder_0 = _stage(w0, w0, d0)
        self.encoder_1 = _stage(w0, w1, d1)
        self.encoder_2 = _stage(w1, w2, d2)
        self.encoder_3 = _stage(w2, w3, d3)
        self.middle_layer = _stage(w3, w4, d4)
        self.decoder_3 = _stage(w3 + w4, w3, d3)
        self.decoder_2 = _stage(w2 + w3, w2, d2)
        self.decoder_1 = _stage(w1 + w2, w1, d1)
        self.decoder_0 = _stage(w0 + w1, w0, d0)
        self.output_0 = nn.Conv2d(w0, 1, 1)
        self.output_1 = nn.Conv2d(w1, 1, 1)
        self.output_2 = nn.Conv2d(w2, 1, 1)
        self.output_3 = nn.Conv2d(w3, 1, 1)
        self.final = nn.Conv2d(4, 1, 3, padding=1)
        self._fold = 0

    @property
    def encoders(self) -> tuple[nn.Sequential, ...]:
        """Encoder stages of the five levels, finest first."""
        stages = (self.encoder_0, self.encoder_1, self.encoder_2, self.encoder_3)
        return *stages, self.middle_layer

    @property
    def decoders(self) -> tuple[nn.Sequential, ...]:
        """Decoder stages of the four finest levels, finest first."""
        return self.decoder_0, self.decoder_1, self.decoder_2, self.decoder_3

    @property
    def heads(self) -> tuple[nn.Conv2d, ...]:
        """Prediction heads of the four finest levels, finest first."""
        return self.output_0, self.output_1, self.output_2, self.output_3

    @property
    def fold(self) -> int:
        """Space-to-depth factor; 0 = standard layers.

        1 to 16 select the TPU form (:mod:`mshnet.model_tpu`): f columns of the finest level become
        channels, f/2 on the next level, and so on; 1 moves no columns. Weights do not change, and
        results change by rounding only.
        """
        return self._fold

    @fold.setter
    def fold(self, columns: int) -> None:
        if columns not in FOLDS:
            raise ValueError(f"fold {columns}: must be one of {', '.join(map(str, FOLDS))}")
        self._fold = columns
        for level, stage in (*enumerate(self.encoders), *enumerate(self.decoders)):
            for block in cast(Iterable[ResidualBlock], stage):
                block.fold = max(1, columns >> level) if columns else 0

    def forward(self, images: Tensor, warm_flag: bool) -> tuple[list[Tensor], Tensor]:
        """Return the logits at every scale and the fused logits.

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
        compute = model_tpu.logits if self.fold else _logits
        scales = compute(self, images, 4 if warm_flag else 1)
        if not warm_flag:
            return [], scales[0]
        enlarged = [upsample(x, 2**i) if i else x for i, x in enumerate(scales)]
        stacked = torch.cat(enlarged, 1)
        return scales, model_tpu.fused(self, stacked) if self.fold else self.final(stacked)


def _logits(net: MSHNet, images: Tensor, heads: int) -> list[Tensor]:
    """Return the logits of the finest heads; see :func:`mshnet.model_tpu.logits`."""
    x = net.conv_init(images)
    maps = []
    for level, encoder in enumerate(net.encoders):
        x = encoder(F.max_pool2d(x, 2) if level else x)
        maps.append(x)
    for level in (3, 2, 1, 0):
        x = maps[level] = net.decoders[level](torch.cat([maps[level], upsample(x, 2)], 1))
    return [head(x) for head, x in zip(net.heads[:heads], maps, strict=False)]
