"""Masks as bits, on an XLA device."""

import torch

from mshnet.data.bitmask import unpack
from tpuscope.engine import torch_xla as runtime


def test_the_device_unpacks_without_a_fallback():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 128)
    before = runtime.counters()
    placed = unpack(every.to(runtime.device())).to(torch.uint8)
    runtime.sync()
    assert torch.equal(placed.cpu(), unpack(every).to(torch.uint8))
    counted = runtime.counters() - before
    assert (counted.compilations, counted.fallbacks) == (1, 0)
