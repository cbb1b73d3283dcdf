"""A narrow MSHNet with the same weights in every process."""

import torch

from mshnet import MSHNet


def narrow_network() -> MSHNet:
    """Return an MSHNet with few channels, with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MSHNet(in_channels=1, widths=(4, 4, 8, 8, 8), depths=(1, 1, 1, 1, 1))
