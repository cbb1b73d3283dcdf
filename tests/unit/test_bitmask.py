"""Masks as bits: packed and unpacked, they are the same."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mshnet.data.bitmask import pack, unpack


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 4),
    eighth=st.integers(1, 5),
    width=st.integers(1, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_what_is_packed_is_unpacked(count, eighth, width, share, seed):
    generator = torch.Generator().manual_seed(seed)
    masks = torch.rand(count, 1, 8 * eighth, width, generator=generator) < share
    bits = pack(masks.to(torch.uint8))
    assert bits.shape == (count, 1, eighth, width)
    assert bits.dtype == torch.uint8
    assert torch.equal(unpack(bits), masks)
    assert torch.equal(pack(masks), bits)


def test_bit_k_is_the_pixel_k_eighths_below():
    masks = torch.zeros(1, 1, 32, 8, dtype=torch.uint8)
    masks[0, 0, 4 * 5 + 3, 6] = 1
    expected = np.zeros((1, 1, 4, 8), np.uint8)
    expected[0, 0, 3, 6] = 1 << 5
    np.testing.assert_array_equal(pack(masks).numpy(), expected)
