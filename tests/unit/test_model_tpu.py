"""The network's TPU form gives the numbers of its standard form."""

import copy

import pytest
import torch

from mshnet import MSHNet
from mshnet.model import FOLDS

WIDTHS = (4, 8, 16, 32, 64)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("f", FOLDS[1:])
def test_a_folded_network_is_the_network(f, training):
    torch.manual_seed(0)
    plain = MSHNet(widths=WIDTHS).train(training)
    folded = copy.deepcopy(plain)
    folded.fold = f
    # Some of batch norm's weights are negative in trained networks.
    for model in (plain, folded):
        model.decoder_0[0].bn2.weight.data[1] = -0.5
        model.decoder_0[0].bn2.weight.data[2] = 0.0
    images = torch.randn(2, 3, 32, 48)
    for model in (plain, folded):
        scales, fused = model(images, True)
        model.maps = [fused, *scales]
        sum(x.square().mean() for x in model.maps).backward()
    for ours, theirs in zip(folded.maps, plain.maps, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # A map that is the same everywhere has its maximum everywhere: who gets the gradient is free.
    for model in (plain, folded):
        gradient = model.decoder_0[0].bn2.weight.grad
        assert gradient[2].isfinite()
        gradient[2] = 0
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
    with pytest.raises(ValueError, match="fold 3: must be one of 0, 1, 2, 4, 8, 16"):
        MSHNet(widths=WIDTHS).fold = 3


def test_a_channel_that_hardly_varies_is_no_nan():
    torch.manual_seed(0)
    net = MSHNet(widths=WIDTHS)
    net.fold = 1
    for block in net.encoder_0:
        block.conv1.bias.data += 1e4  # whose square float32 knows to 8
    loss = net(torch.randn(2, 3, 32, 32), True)[1].square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
