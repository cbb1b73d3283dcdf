"""Batch norm in channels-last layout against PyTorch's layer in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mshnet.batch_norm import BatchNorm2d, batch_norm


def layer_of(channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = BatchNorm2d(channels)
    with torch.no_grad():
        for value in (layer.weight, layer.bias, layer.running_mean):
            value.copy_(torch.randn(channels, generator=generator))
    return layer


def run(function, layer, x, gradient):
    """Result, gradients and running statistics."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(layer, x)
    gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], gradient)
    return y, *gradients, layer.running_mean, layer.running_var


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 5),
    height=st.integers(1, 6),
    width=st.integers(2, 6),
    shift=st.floats(-3, 3),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_layer(batch, channels, height, width, shift, training, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, height, width, generator=generator) + shift
    gradient = torch.randn(x.shape, generator=generator)
    layer = layer_of(channels, seed).train(training)
    x = x.to(memory_format=torch.channels_last)
    expected = run(nn.Module.__call__, copy.deepcopy(layer).double(), x.double(), gradient.double())
    found = run(batch_norm, layer, x, gradient)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-4)
    assert layer.num_batches_tracked == training


def test_sums_of_many_pixels_are_right():
    """PyTorch 2.9's own kernel for this layout errs a hundred times as much here."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, 256, 256).add(0.5).to(memory_format=torch.channels_last)
    gradient = torch.randn_like(x)
    layer = layer_of(4)
    expected = run(nn.Module.__call__, copy.deepcopy(layer).double(), x.double(), gradient.double())
    for ours, exact in zip(run(batch_norm, layer, x, gradient), expected, strict=True):
        assert (ours - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_the_layer_s(dtype):
    x = torch.randn(2, 3, 4, 4).to(dtype).to(memory_format=torch.channels_last)
    layer = layer_of(3).to(dtype)
    assert torch.equal(batch_norm(layer, x), copy.deepcopy(layer)(x))
