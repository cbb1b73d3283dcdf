"""Generator and discriminator.

Written from the description in SRGAN (arXiv 1609.04802, section 2.1 and figure 4) with what
Fast-SRGAN changes for speed. What differs from the paper, and why:

* the generator's residual blocks are inverted residuals (MobileNetV2, arXiv 1801.04381): 1×1 to
  more channels, 3×3 on each channel alone, 1×1 back. Fast-SRGAN's change.
* it computes a *correction* to bicubic interpolation, and its last layer begins at zero. An
  untrained generator is therefore bicubic interpolation, exactly, and a short training starts from
  there instead of from noise. Its outer convolutions are 3×3 where the paper has 9×9.
* the discriminator's two dense layers are 1×1 convolutions, so that it judges overlapping patches
  and takes frames of any size. The loss is the mean over the patches.

Frames are grey, float32, 0..1. All shapes are fixed once the input's is: one XLA program.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpuscope.errors import RequestError

SCALES = (2, 4)


class Bicubic(nn.Module):
    """``F.interpolate(mode="bicubic")`` by a whole number, as one convolution: (B, 1, H, W).

    PyTorch's own has no XLA lowering off TPU. Interpolation by s gives s·s pixels for each one of
    the input, each a fixed weighting of its 5×5 neighbours: a convolution to s·s channels and a
    pixel shuffle, the same two operations that the generator learns with.
    """

    def __init__(self, scale: int):
        super().__init__()
        self.scale = scale
        self.register_buffer("taps", _bicubic_taps(scale), persistent=False)

    def forward(self, low: Tensor) -> Tensor:
        # PyTorch repeats border pixels, too.
        padded = F.pad(low, (2, 2, 2, 2), mode="replicate")
        return F.pixel_shuffle(F.conv2d(padded, self.taps), self.scale)


def _bicubic_taps(scale: int) -> Tensor:
    """Return the weights of 5×5 neighbours in s·s new pixels, (s·s, 1, 5, 5).

    Read off PyTorch's interpolation of images that are 1 in one pixel and 0 elsewhere, far from
    the border.
    """
    neighbours = torch.zeros(25, 1, 9, 9)
    for i in range(25):
        neighbours[i, 0, 2 + i // 5, 2 + i % 5] = 1
    enlarged = F.interpolate(neighbours, scale_factor=scale, mode="bicubic", align_corners=False)
    middle = slice(4 * scale, 5 * scale)  # what becomes of pixel (4, 4)
    return enlarged[:, 0, middle, middle].reshape(25, -1).T.reshape(-1, 1, 5, 5).contiguous()


class InvertedResidual(nn.Module):
    """MobileNetV2's block with the paper's PReLU: (B, C, H, W) → the same shape."""

    def __init__(self, channels: int, expansion: int):
        super().__init__()
        hidden = channels * expansion
        self.layers = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.PReLU(hidden),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.PReLU(hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Generator(nn.Module):
    """Low resolution to high: (B, 1, H, W) → (B, 1, s·H, s·W), float32, about 0..1.

    Args:
        scale: s, 2 or 4.
        width: channels throughout; Fast-SRGAN's first release has 32.
        blocks: inverted residuals; Fast-SRGAN's first release has 6.
        expansion: of the channels within a block; MobileNetV2 has 6.

    Raises:
        RequestError: the scale is another.
    """

    def __init__(self, scale: int = 2, width: int = 32, blocks: int = 6, expansion: int = 4):
        super().__init__()
        if scale not in SCALES:
            raise RequestError(f"--scale {scale}: must be 2 or 4")
        self.scale = scale
        self.bicubic = Bicubic(scale)
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.PReLU(width))
        self.blocks = nn.Sequential(*(InvertedResidual(width, expansion) for _ in range(blocks)))
        self.gather = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        enlarge = []
        for _ in range(scale.bit_length() - 1):  # by 2 each
            enlarge += [nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)]
            enlarge += [nn.PReLU(width)]
        self.enlarge = nn.Sequential(*enlarge)
        self.last = nn.Conv2d(width, 1, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, low: Tensor) -> Tensor:
        x = self.first(low)
        x = x + self.gather(self.blocks(x))
        return self.bicubic(low) + self.last(self.enlarge(x))


class Discriminator(nn.Module):
    """Whether patches are real: (B, 1, H, W) → logits (B, 1, H/16, W/16), rounded up.

    Eight 3×3 convolutions, every second one with stride 2, the width doubled three times.

    Args:
        width: channels of the first layer; the paper has 64.
    """

    def __init__(self, width: int = 64):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.LeakyReLU(0.2)]
        before = width
        for i in range(1, 8):
            channels = width << (i // 2)
            layers += [
                nn.Conv2d(before, channels, 3, stride=1 + i % 2, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.LeakyReLU(0.2),
            ]
            before = channels
        layers += [nn.Conv2d(before, 2 * before, 1), nn.LeakyReLU(0.2), nn.Conv2d(2 * before, 1, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, frames: Tensor) -> Tensor:
        return self.layers(frames)
