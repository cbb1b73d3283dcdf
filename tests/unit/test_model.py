"""The network's contract beyond the golden numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mshnet import MSHNet

NARROW = {"widths": (4, 4, 8, 8, 16), "depths": (1, 1, 1, 1, 1)}


@pytest.fixture
def narrow():
    torch.manual_seed(0)
    return MSHNet(3, **NARROW).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


# --- outputs -------------------------------------------------------------------------------------


def test_warm_up_gives_one_map_and_the_full_phase_all(narrow, images):
    none, warm = narrow(images, False)
    scales, fused = narrow(images, True)
    assert none == []
    assert warm.shape == fused.shape == (2, 1, 32, 48)
    assert [tuple(s.shape) for s in scales] == [
        (2, 1, 32, 48),
        (2, 1, 16, 24),
        (2, 1, 8, 12),
        (2, 1, 4, 6),
    ]
    assert torch.equal(warm, scales[0])
    assert not torch.equal(fused, warm)


def test_in_warm_up_only_the_full_size_head_learns(narrow, images):
    narrow.train()
    narrow(images, False)[1].sum().backward()
    untouched = {name.split(".")[0] for name, p in narrow.named_parameters() if p.grad is None}
    assert untouched == {"output_1", "output_2", "output_3", "final"}


def test_in_the_full_phase_every_parameter_gets_a_gradient(narrow, images):
    narrow.train()
    narrow(images, True)[1].sum().backward()
    assert [n for n, p in narrow.named_parameters() if p.grad is None] == []


def test_images_of_a_batch_do_not_influence_each_other_in_evaluation(narrow, images):
    together = narrow(images, True)[1]
    alone = torch.cat([narrow(image[None], True)[1] for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


# --- construction --------------------------------------------------------------------------------


def test_a_narrow_network_has_the_official_names():
    official = MSHNet(3).state_dict()
    narrow = MSHNet(3, widths=(2, 4, 8, 16, 32)).state_dict()
    assert list(narrow) == list(official)
    assert {k: v.dim() for k, v in narrow.items()} == {k: v.dim() for k, v in official.items()}


def test_a_shallow_network_has_a_subset_of_the_official_names():
    shallow = set(MSHNet(3, depths=(1, 1, 1, 1, 1)).state_dict())
    official = set(MSHNet(3).state_dict())
    assert shallow < official
    assert all(".1." in name for name in official - shallow)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_input_channels(channels):
    model = MSHNet(channels, **NARROW).eval()
    assert model(torch.zeros(1, channels, 16, 16), True)[1].shape == (1, 1, 16, 16)


@pytest.mark.parametrize("change", [{"widths": (4, 4, 8, 8)}, {"depths": (1,) * 6}])
def test_other_than_five_levels_are_refused(change):
    with pytest.raises(ValueError, match="five levels"):
        MSHNet(3, **change)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return MSHNet(1, widths=(2, 2, 2, 2, 2), depths=(1, 1, 1, 1, 1)).eval()


@settings(max_examples=15, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40))
def test_a_size_is_accepted_or_answered_with_one_that_works(model, height, width):
    images = torch.zeros(1, 1, height, width)
    if height % 16 == 0 and width % 16 == 0:
        assert model(images, True)[1].shape == images.shape
        return
    with pytest.raises(ValueError, match=f"{height}×{width}") as caught:
        model(images, True)
    good = [int(side) for side in str(caught.value).rsplit(" ", 1)[1].split("×")]
    assert model(torch.zeros(1, 1, *good), True)[1].shape == (1, 1, *good)
    assert np.abs(np.subtract(good, (height, width))).max() < 16


# --- precision -----------------------------------------------------------------------------------


def test_bf16_autocast_is_close_to_float32(narrow, images):
    with torch.no_grad():
        full = narrow(images, True)[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = narrow(images, True)[1]
    assert half.dtype == torch.bfloat16
    error = (half.float() - full).norm() / full.norm()
    assert 0 < error < 0.02  # bfloat16 has 8 bits: one rounding is 0.4 %
