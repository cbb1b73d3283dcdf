"""Losses of the two networks (SRGAN, arXiv 1609.04802, section 2.2).

**Perceptual loss without downloaded weights.** The paper compares the maps of a VGG network trained
on ImageNet. Here the default is :class:`FixedFeatures`: the same kind of network with random
weights drawn from a seed, never trained. Why this substitute:

* Liu et al. (CVPR 2021, arXiv 2103.10571) tried it for super-resolution, too: what a perceptual
  loss needs is the structure of a deep network; with random weights it did about as well.
* ImageNet's features are those of colour photographs; an infrared frame has one channel, and its
  targets are a few pixels. The features here keep the fine scales: full, half and quarter size.
* A frozen detector's features would be the other choice. They were not taken because the detector
  is what the result is judged by (:mod:`.detect`): it would be trained for its own examiner.

Who has VGG19's weights as a file (torchvision's ``vgg19-….pth``) gives its path and gets the
paper's φ5,4 (:class:`VggFeatures`).
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mshnet.training import checkpoint
from mshnet.training.step import DEVIATION, MEAN
from tpuscope.errors import RequestError

SEED = 11  # of the fixed features; part of the loss's definition


class FixedFeatures(nn.Module):
    """Maps of an untrained, seeded network of VGG's kind, at three scales.

    Three pairs of 3×3 convolutions with ReLU, halved between the pairs.

    Args:
        widths: channels at full, half and quarter size.
    """

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 64)):
        super().__init__()
        random = torch.Generator().manual_seed(SEED)
        self.stages = nn.ModuleList()
        before = 1
        for width in widths:
            layers: list[nn.Module] = []
            for channels in (before, width):
                layer = nn.utils.skip_init(nn.Conv2d, channels, width, 3, padding=1)
                # Keeps the variance from layer to layer, so that no scale drowns the others.
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=random)
                nn.init.zeros_(layer.bias)
                layers += [layer, nn.ReLU()]
            self.stages.append(nn.Sequential(*layers))
            before = width
        self.requires_grad_(False)

    def forward(self, frames: Tensor) -> list[Tensor]:
        """Frames (B, 1, H, W), 0..1 → maps (B, C, H/2^i, W/2^i), i = 0, 1, 2."""
        x = (frames - 0.5) * 4  # about mean 0 and deviation 1
        maps = []
        for i, stage in enumerate(self.stages):
            x = stage(F.max_pool2d(x, 2) if i else x)
            maps.append(x)
        return maps


class VggFeatures(nn.Module):
    """φ5,4 of VGG19: the last map before its fifth pooling, over 12.75 as in the paper.

    Args:
        path: a state_dict of torchvision's ``vgg19``; its classifier is not used and may lack.

    Raises:
        RequestError: torchvision is not installed, or the file is no such state_dict.
    """

    def __init__(self, path: str | Path):
        super().__init__()
        try:
            from torchvision.models import vgg
        except ImportError as error:
            raise RequestError(
                "--vgg needs torchvision: pip install torchvision==0.24.0"
            ) from error
        layers = vgg.make_layers(vgg.cfgs["E"])[:36]
        prefix = "features."
        found = checkpoint.weights_of(checkpoint.load(path), path)
        found = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        own = layers.state_dict()
        if any(name not in found or found[name].shape != own[name].shape for name in own):
            raise RequestError(
                f"--vgg {path} is no state_dict of torchvision's vgg19; save "
                "torchvision.models.vgg19(weights='DEFAULT').state_dict() and name that file"
            )
        layers.load_state_dict({name: found[name] for name in own})
        self.layers = layers.requires_grad_(False)
        for layer in self.layers:
            if isinstance(layer, nn.ReLU):
                layer.inplace = False
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer(
            "scale", 1 / torch.tensor(DEVIATION).view(1, 3, 1, 1), persistent=False
        )

    def forward(self, frames: Tensor) -> list[Tensor]:
        """Frames (B, 1, H, W), 0..1 → one map (B, 512, H/16, W/16)."""
        return [self.layers((frames - self.mean) * self.scale) / 12.75]


def features(vgg: str | Path | None) -> nn.Module:
    """Return VGG's features from a file, or the fixed ones."""
    return VggFeatures(vgg) if vgg else FixedFeatures()


def perceptual_loss(network: nn.Module, made: Tensor, real: Tensor) -> Tensor:
    """Return the mean absolute difference of the maps, averaged over the scales (equation 5).

    The paper squares; absolute differences need no other weight for other features.
    """
    with torch.no_grad():
        wanted = network(real)
    pairs = list(zip(network(made), wanted, strict=True))
    return torch.stack([F.l1_loss(a, b) for a, b in pairs]).mean()


def adversarial_loss(logits: Tensor) -> Tensor:
    """Return the generator's loss: -log D(G(low)), mean over patches (equation 6)."""
    return F.softplus(-logits).mean()


def discriminator_loss(real: Tensor, made: Tensor) -> Tensor:
    """Return the discriminator's cross-entropy, from logits (equation 2)."""
    return F.softplus(-real).mean() + F.softplus(made).mean()
