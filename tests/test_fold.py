"""Folded layers and the folded network: the same numbers as without."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mshnet import MSHNet, fold
from mshnet.model import FOLDS, upsample

WIDTHS = (4, 8, 16, 32, 64)
folds = st.sampled_from(FOLDS)


def maps(channels: int = 3, height: int = 6, columns: int = 2, f: int = 4) -> torch.Tensor:
    return torch.randn(2, channels, height, columns * f, dtype=torch.double)


@settings(max_examples=20, deadline=None)
@given(f=folds, channels=st.integers(1, 4), columns=st.integers(1, 3))
def test_folding_takes_neighbouring_columns_and_can_be_undone(f, channels, columns):
    x = maps(channels, 5, columns, f)
    folded = fold.fold(x, f)
    assert folded.shape == (2, channels * f, 5, columns)
    assert (folded[:, (channels - 1) * f + f - 1, :, 0] == x[:, channels - 1, :, f - 1]).all()
    assert (fold.unfold(folded, f) == x).all()


@settings(max_examples=40, deadline=None)
@given(f=folds, size=st.sampled_from([1, 3, 5, 7]), columns=st.integers(1, 4))
def test_a_folded_kernel_convolves_as_the_kernel_does(f, size, columns):
    x, weight = maps(2, 5, columns, f), torch.randn(3, 2, size, size, dtype=torch.double)
    kernel = fold.kernel(weight, f)
    got = F.conv2d(fold.fold(x, f), kernel, padding=(size // 2, kernel.shape[3] // 2))
    expected = F.conv2d(x, weight, padding=size // 2)
    torch.testing.assert_close(fold.unfold(got, f), expected)


@pytest.mark.parametrize("f", FOLDS[1:])
def test_pooling_leaves_every_other_column(f):
    x = maps(3, 6, 2, f)
    kept = fold.without_ignored(fold.max_pool(fold.fold(x, f), f), 3 * f // 2)
    torch.testing.assert_close(fold.unfold(kept, f // 2), F.max_pool2d(x, 2))


@pytest.mark.parametrize("f", FOLDS[:-1])
@pytest.mark.parametrize(("height", "columns"), [(1, 1), (2, 1), (5, 3)])
def test_doubling_is_bilinear_upsampling(f, height, columns):
    x = maps(3, height, columns, f).requires_grad_()
    got = fold.unfold(fold.double(fold.fold(x, f), f), 2 * f)
    expected = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    # Places and shares are float32, here and in upsample().
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    [ours] = torch.autograd.grad((got * weights).sum(), x)
    [theirs] = torch.autograd.grad((upsample(x, 2) * weights).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", FOLDS)
@pytest.mark.parametrize("channels", [1, 2, 6, 34])
def test_mean_and_peak_of_channels_and_their_gradients(f, channels):
    x = maps(channels, 3, 2, f)
    x[0, :, 0, 0] = 1.0  # channels that share the maximum share its gradient
    x.requires_grad_()
    got = fold.unfold(fold.mean_and_peak_of_channels(fold.fold(x, f), f), f)
    expected = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    torch.testing.assert_close(got, expected)
    weights = torch.randn_like(expected)
    [ours] = torch.autograd.grad((got * weights).sum(), x)
    [theirs] = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("f", FOLDS[1:])
def test_a_folded_network_is_the_network(f, training):
    torch.manual_seed(0)
    plain = MSHNet(widths=WIDTHS).train(training)
    folded = copy.deepcopy(plain)
    folded.fold = f
    images = torch.randn(2, 3, 32, 48)
    for model in (plain, folded):
        scales, fused = model(images, True)
        model.maps = [fused, *scales]
        sum(x.square().mean() for x in model.maps).backward()
    for ours, theirs in zip(folded.maps, plain.maps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(folded.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-3 * theirs.grad.norm() + 1e-5
    for ours, theirs in zip(folded.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_folding_is_no_part_of_the_weights():
    folded = MSHNet(widths=WIDTHS)
    folded.fold = 8
    assert list(folded.state_dict()) == list(MSHNet(widths=WIDTHS).state_dict())


def test_levels_of_one_width_fold_too():
    torch.manual_seed(0)
    plain = MSHNet(widths=(2, 2, 2, 2, 2))  # no shortcut convolutions: columns to be ignored go on
    folded = copy.deepcopy(plain)
    folded.fold = 16
    images = torch.randn(2, 3, 16, 32)
    torch.testing.assert_close(
        folded(images, False)[1], plain(images, False)[1], rtol=1e-4, atol=1e-5
    )


def test_a_fold_that_is_none_is_refused():
    with pytest.raises(ValueError, match="fold 3: must be one of 1, 2, 4, 8, 16"):
        MSHNet(widths=WIDTHS).fold = 3
