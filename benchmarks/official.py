"""MSHNet's official training step, rewritten for comparison.

Written from the description of network and loss in the paper (CVPR 2024, arXiv 2403.19366) and of
what the official code does, in plain PyTorch: upsampling by ``nn.Upsample``, pooling by
``nn.AdaptiveAvgPool2d`` and ``nn.AdaptiveMaxPool2d``, a loss that loops over the samples of a
batch, and float32 RGB images. The numbers are those of :class:`mshnet.MSHNet` and of
``mshnet.SLSIoULoss(official=True)``; only the way of computing them differs.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ChannelAttention(nn.Module):
    """One weight in 0..1 for each channel: (B, C, H, W) → (B, C, 1, 1)."""

    def __init__(self, channels: int, reduction: int = 16):
        super().__init__()
        hidden = max(channels // reduction, 1)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.peak = nn.AdaptiveMaxPool2d(1)
        self.fc1 = nn.Conv2d(channels, hidden, 1, bias=False)
        self.fc2 = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        average = self.fc2(F.relu(self.fc1(self.average(x))))
        peak = self.fc2(F.relu(self.fc1(self.peak(x))))
        return torch.sigmoid(average + peak)


class SpatialAttention(nn.Module):
    """One weight in 0..1 for each pixel: (B, C, H, W) → (B, 1, H, W)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        average = torch.mean(x, dim=1, keepdim=True)
        peak, _ = torch.max(x, dim=1, keepdim=True)
        return torch.sigmoid(self.conv1(torch.cat([average, peak], dim=1)))


class Block(nn.Module):
    """Two 3×3 convolutions, channel then spatial attention, and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = None
        if in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1), nn.BatchNorm2d(out_channels)
            )
        self.ca = ChannelAttention(out_channels)
        self.sa = SpatialAttention()

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.ca(out) * out
        out = self.sa(out) * out
        return F.relu(out + residual)


def _layer(in_channels: int, out_channels: int, depth: int) -> nn.Sequential:
    rest = [Block(out_channels, out_channels) for _ in range(depth - 1)]
    return nn.Sequential(Block(in_channels, out_channels), *rest)


class OfficialMSHNet(nn.Module):
    """The network with upsampling modules; state_dict keys are the official ones.

    Args:
        in_channels: of the images.
        widths: channels of the five levels, finest first.
        depths: blocks of the five levels, finest first.
    """

    def __init__(
        self,
        in_channels: int = 3,
        widths: Sequence[int] = (16, 32, 64, 128, 256),
        depths: Sequence[int] = (1, 2, 2, 2, 2),
    ):
        super().__init__()
        w = widths
        self.pool = nn.MaxPool2d(2, 2)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up_4 = nn.Upsample(scale_factor=4, mode="bilinear", align_corners=True)
        self.up_8 = nn.Upsample(scale_factor=8, mode="bilinear", align_corners=True)
        self.conv_init = nn.Conv2d(in_channels, w[0], 1)
        self.encoder_0 = _layer(w[0], w[0], depths[0])
        self.encoder_1 = _layer(w[0], w[1], depths[1])
        self.encoder_2 = _layer(w[1], w[2], depths[2])
        self.encoder_3 = _layer(w[2], w[3], depths[3])
        self.middle_layer = _layer(w[3], w[4], depths[4])
        self.decoder_3 = _layer(w[3] + w[4], w[3], depths[3])
        self.decoder_2 = _layer(w[2] + w[3], w[2], depths[2])
        self.decoder_1 = _layer(w[1] + w[2], w[1], depths[1])
        self.decoder_0 = _layer(w[0] + w[1], w[0], depths[0])
        self.output_0 = nn.Conv2d(w[0], 1, 1)
        self.output_1 = nn.Conv2d(w[1], 1, 1)
        self.output_2 = nn.Conv2d(w[2], 1, 1)
        self.output_3 = nn.Conv2d(w[3], 1, 1)
        self.final = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor, warm_flag: bool) -> tuple[list[Tensor], Tensor]:
        """(B, C, H, W) → logits of all scales and fused, as :class:`mshnet.MSHNet` gives them."""
        e0 = self.encoder_0(self.conv_init(x))
        e1 = self.encoder_1(self.pool(e0))
        e2 = self.encoder_2(self.pool(e1))
        e3 = self.encoder_3(self.pool(e2))
        middle = self.middle_layer(self.pool(e3))
        d3 = self.decoder_3(torch.cat([e3, self.up(middle)], 1))
        d2 = self.decoder_2(torch.cat([e2, self.up(d3)], 1))
        d1 = self.decoder_1(torch.cat([e1, self.up(d2)], 1))
        d0 = self.decoder_0(torch.cat([e0, self.up(d1)], 1))
        if not warm_flag:
            return [], self.output_0(d0)
        masks = [self.output_0(d0), self.output_1(d1), self.output_2(d2), self.output_3(d3)]
        enlarged = [masks[0], self.up(masks[1]), self.up_4(masks[2]), self.up_8(masks[3])]
        return masks, self.final(torch.cat(enlarged, 1))


def location_loss(p: Tensor, t: Tensor) -> Tensor:
    """Return the mean over the batch, sample by sample; both (B, 1, H, W)."""
    loss = torch.zeros((), device=p.device)
    height, width = p.shape[-2:]
    x = torch.arange(width, device=p.device).view(1, 1, width) / width
    y = torch.arange(height, device=p.device).view(1, height, 1) / height
    for i in range(p.shape[0]):
        p_x, p_y = (x * p[i]).mean(), (y * p[i]).mean()
        t_x, t_y = (x * t[i]).mean(), (y * t[i]).mean()
        difference = torch.arctan(p_y / (p_x + 1e-8)) - torch.arctan(t_y / (t_x + 1e-8))
        angle = (4 / math.pi**2) * torch.square(difference)
        p_length = torch.sqrt(p_x * p_x + p_y * p_y + 1e-8)
        t_length = torch.sqrt(t_x * t_x + t_y * t_y + 1e-8)
        ratio = torch.min(p_length, t_length) / (torch.max(p_length, t_length) + 1e-8)
        loss = loss + 1 - ratio + angle
    return loss / p.shape[0]


def sls_loss(logits: Tensor, t: Tensor, warm_epoch: int, epoch: int) -> Tensor:
    """Return the scale- and location-sensitive IoU loss; both (B, 1, H, W), t of 0 and 1, float."""
    p = torch.sigmoid(logits)
    intersection = (p * t).sum((1, 2, 3))
    p_sum, t_sum = p.sum((1, 2, 3)), t.sum((1, 2, 3))
    distance = torch.pow((p_sum - t_sum) / 2, 2)
    alpha = torch.min(p_sum, t_sum) + distance
    alpha = alpha / (torch.max(p_sum, t_sum) + distance)
    iou = intersection / (p_sum + t_sum - intersection)
    location = location_loss(p, t)  # computed in the warm-up too, and not used
    if epoch <= warm_epoch:
        return 1 - iou.mean()
    return 1 - (alpha * iou).mean() + location


def official_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    masks: Tensor,
    warm_epoch: int,
    epoch: int,
    criterion: Callable[[Tensor, Tensor, int, int], Tensor] = sls_loss,
) -> Tensor:
    """Run forward, loss, backward and update; return the loss.

    Args:
        images: float32, (B, 3, H, W), normalised, on the device.
        masks: float32 of 0 and 1, (B, 1, H, W), on the device.
        criterion: the loss of one map, as :func:`sls_loss`.
    """
    scales, fused = model(images, epoch > warm_epoch)
    loss = criterion(fused, masks, warm_epoch, epoch)
    for i, logits in enumerate(scales):
        if i > 0:
            masks = F.max_pool2d(masks, 2, 2)
        loss = loss + criterion(logits, masks, warm_epoch, epoch)
    loss = loss / (len(scales) + 1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def official_step(*args, **kwargs) -> float:
    """Run :func:`official_update`; return the loss's value, which reads the device."""
    return official_update(*args, **kwargs).item()  # every step, for the mean that is shown
