"""Space-to-depth operations give the numbers of the standard layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mshnet import space_to_depth

FOLDS = (1, 2, 4, 8, 16)
folds = st.sampled_from(FOLDS)


def maps(channels: int = 3, height: int = 6, columns: int = 2, f: int = 4) -> torch.Tensor:
    return torch.randn(2, channels, height, columns * f, dtype=torch.double)


@settings(max_examples=20, deadline=None)
@given(f=folds, channels=st.integers(1, 4), columns=st.integers(1, 3))
def test_folding_takes_neighbouring_columns_and_can_be_undone(f, channels, columns):
    x = maps(channels, 5, columns, f)
    folded = space_to_depth.fold(x, f)
    assert folded.shape == (2, channels * f, 5, columns)
    assert (folded[:, (channels - 1) * f + f - 1, :, 0] == x[:, channels - 1, :, f - 1]).all()
    assert (space_to_depth.unfold(folded, f) == x).all()


@settings(max_examples=40, deadline=None)
@given(f=folds, size=st.sampled_from([1, 3, 5, 7]), columns=st.integers(1, 4))
def test_a_folded_kernel_convolves_as_the_kernel_does(f, size, columns):
    x, weight = maps(2, 5, columns, f), torch.randn(3, 2, size, size, dtype=torch.double)
    kernel = space_to_depth.kernel(weight, f)
    got = F.conv2d(space_to_depth.fold(x, f), kernel, padding=(size // 2, kernel.shape[3] // 2))
    expected = F.conv2d(x, weight, padding=size // 2)
    torch.testing.assert_close(space_to_depth.unfold(got, f), expected)


@pytest.mark.parametrize("f", FOLDS[1:])
def test_pooling_leaves_every_other_column(f):
    x = maps(3, 6, 2, f)
    kept = space_to_depth.without_ignored(
        space_to_depth.max_pool(space_to_depth.fold(x, f), f), 3 * f // 2
    )
    torch.testing.assert_close(space_to_depth.unfold(kept, f // 2), F.max_pool2d(x, 2))


@pytest.mark.parametrize("f", FOLDS)
@pytest.mark.parametrize("copies", [1, 3])
def test_a_layer_takes_folded_maps_and_what_pooling_leaves(f, copies):
    layer = nn.Conv2d(3, 4, 3, padding=1).double()
    x = maps(3, 6, 4, f)
    got = space_to_depth.conv2d(space_to_depth.fold(x, f), layer, f, copies).unflatten(
        1, (copies, -1)
    )
    for copy in got.unbind(1):
        torch.testing.assert_close(space_to_depth.unfold(copy, f), layer(x))
    if f > 1:
        got = space_to_depth.conv2d(
            space_to_depth.max_pool(space_to_depth.fold(x, f), f), layer, f // 2
        )
        torch.testing.assert_close(space_to_depth.unfold(got, f // 2), layer(F.max_pool2d(x, 2)))


@pytest.mark.parametrize("f", FOLDS)
@pytest.mark.parametrize("channels", [1, 2, 6, 34])
def test_mean_and_peak_of_channels_and_their_gradients(f, channels):
    x = maps(channels, 3, 2, f)
    x[0, :, 0, 0] = 1.0  # channels that share the maximum share its gradient
    x.requires_grad_()
    got = space_to_depth.unfold(
        space_to_depth.mean_and_peak_of_channels(space_to_depth.fold(x, f), f), f
    )
    expected = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    torch.testing.assert_close(got, expected)
    weights = torch.randn_like(expected)
    [ours] = torch.autograd.grad((got * weights).sum(), x)
    [theirs] = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(ours, theirs)
