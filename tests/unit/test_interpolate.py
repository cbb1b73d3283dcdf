"""Interpolation against PyTorch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mshnet.interpolate import by_matrices, double, upsample
from mshnet.space_to_depth import fold, unfold


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    scale=st.sampled_from([2, 3, 4, 8]),
    seed=st.integers(0, 99),
)
def test_upsampling_is_bilinear(height, width, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, height, width, generator=generator, requires_grad=True)
    weight = torch.randn(2, 3, height * scale, width * scale, generator=generator)
    usual = F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=True)
    expected = torch.autograd.grad((usual * weight).sum(), x)[0]
    for function in (upsample, by_matrices):
        ours = function(x, scale)
        torch.testing.assert_close(ours, usual, rtol=1e-5, atol=2e-5)
        gradient = torch.autograd.grad((ours * weight).sum(), x)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-4)


def test_matrices_keep_corners_and_constants_exactly():
    x = torch.randn(1, 1, 8, 8)
    large = by_matrices(x, 4)
    assert torch.equal(large[..., ::31, ::31], x[..., ::7, ::7])
    torch.testing.assert_close(by_matrices(torch.ones(1, 1, 5, 9), 8), torch.ones(1, 1, 40, 72))


@pytest.mark.parametrize("function", [upsample, by_matrices])
def test_upsampling_keeps_the_dtype(function):
    assert function(torch.ones(1, 1, 4, 4, dtype=torch.bfloat16), 2).dtype == torch.bfloat16


@pytest.mark.parametrize("f", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("height", "columns"), [(1, 1), (2, 1), (5, 3), (128, 16)])
def test_doubling_is_upsampling_by_two(f, height, columns):
    g = max(1, f // 2)
    x = torch.randn(2, 3, height, columns * g, requires_grad=True)
    ours, theirs = unfold(double(fold(x, g), f), f), upsample(x, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
    weight = torch.randn_like(theirs)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("f", [1, 8])
def test_doubling_in_bfloat16_errs_by_its_rounding(f):
    g = max(1, f // 2)
    x = torch.randn(2, 3, 64, 64)
    exact = upsample(x, 2)
    ours = unfold(double(fold(x.bfloat16(), g), f), f).float() - exact
    theirs = upsample(x.bfloat16(), 2).float() - exact
    # Folded, the map between the two directions is rounded too: 2.4 times (1.3 without a fold).
    assert ours.abs().mean() < 3 * theirs.abs().mean()
    assert ours.mean().abs() < 2e-4  # and no bias: 7e-5 at most of 60 seeds
