"""Training augmentation: reproducible, in the documented ranges, mask and image together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from mshnet.data import augment as module
from mshnet.data.augment import augment, resize

BLUR = ImageFilter.GaussianBlur


@pytest.fixture
def sharp(monkeypatch):
    """No blur, and the image is resampled as the mask is: what moves, moves exactly together."""
    monkeypatch.setattr(module, "BILINEAR", module.NEAREST)
    monkeypatch.setattr(ImageFilter, "GaussianBlur", lambda radius: BLUR(0))


def noise(height, width, *channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)


def many(image, mask, base, crop, count=400):
    return [augment(image, mask, base, crop, np.random.default_rng([1, i])) for i in range(count)]


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    channels=st.sampled_from([(), (3,)]),
    base=st.sampled_from([16, 32]),
    crop=st.sampled_from([16, 32]),
    seed=st.integers(0, 999),
)
def test_shape_type_and_reproducibility(height, width, channels, base, crop, seed):
    image, mask = noise(height, width, *channels), noise(height, width) % 2
    first, second = (
        augment(image, mask, base, crop, np.random.default_rng(seed)) for _ in range(2)
    )
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert first[0].shape == (crop, crop, *channels)
    assert first[1].shape == (crop, crop)
    assert first[0].dtype == first[1].dtype == np.uint8
    assert set(np.unique(first[1])) <= {0, 1}


def test_the_sample_is_left_as_it_was():
    image, mask = noise(32, 32), noise(32, 32) % 2
    before = image.copy(), mask.copy()
    many(image, mask, 32, 32, 20)
    np.testing.assert_array_equal(image, before[0])
    np.testing.assert_array_equal(mask, before[1])


def test_the_mask_moves_with_the_image(sharp):
    mask = (noise(40, 56) > 200).astype(np.uint8)
    moved = many(mask * 255, mask, 32, 32, 60)
    for image, target in moved:
        np.testing.assert_array_equal(image, target * 255)
    assert len({target.tobytes() for _, target in moved}) > 50


def test_the_mask_moves_with_the_image_when_resampled():
    mask = np.zeros((48, 48), np.uint8)
    mask[10:30, 5:20] = 1
    for image, target in many(mask * 255, mask, 48, 48, 60):
        differ = (image > 127) != (target == 1)
        edge = np.asarray(Image.fromarray(target * 255).filter(ImageFilter.FIND_EDGES)) > 0
        assert not (differ & ~edge & ~_grown(edge)).any()


def _grown(edge):
    return np.asarray(Image.fromarray(edge).convert("L").filter(ImageFilter.MaxFilter(3))) > 0


def test_half_of_the_samples_are_flipped(sharp):
    image = np.full((32, 32), 50, np.uint8)
    image[:, 16:] = 200  # brighter on the right; the crop holds the whole image
    mask = np.zeros((32, 32), np.uint8)
    flipped = [picture[0, 0] == 200 for picture, _ in many(image, mask, 32, 64)]
    assert 0.42 < np.mean(flipped) < 0.58  # 3 deviations of 400 throws are 0.075


def test_the_long_side_lies_between_half_and_twice_the_base(sharp):
    image, mask = np.full((20, 40), 255, np.uint8), np.zeros((20, 40), np.uint8)
    widths = []
    for picture, _ in many(image, mask, 32, 64):
        width, height = int((picture[0] > 0).sum()), int((picture[:, 0] > 0).sum())
        assert abs(height - width / 2) <= 0.5
        widths.append(width)
    assert min(widths) >= 16
    assert max(widths) <= 64
    # Each of the 49 lengths is drawn with the same chance: in 400 draws some are 16, 17, 63, 64.
    assert min(widths) <= 17
    assert max(widths) >= 63
    assert 38 < np.mean(widths) < 42


def test_what_the_image_does_not_fill_is_black_background(sharp):
    image, mask = np.full((8, 16), 255, np.uint8), np.ones((8, 16), np.uint8)
    for picture, target in many(image, mask, 16, 32, 40):
        rows, columns = np.nonzero(target)
        filled = np.zeros_like(target)
        filled[: rows.max() + 1, : columns.max() + 1] = 1  # it begins in the upper left corner
        np.testing.assert_array_equal(target, filled)
        np.testing.assert_array_equal(picture, filled * 255)


def test_crops_reach_every_edge(sharp):
    image = np.zeros((64, 64), np.uint8)
    image[[0, -1], :] = 100
    image[:, [0, -1]] = 200
    crops = [p for p, _ in many(image, np.zeros_like(image), 64, 32)]
    assert any((p[0] >= 100).all() for p in crops)
    assert any((p[-1] >= 100).all() for p in crops)
    assert any((p[:, 0] == 200).all() for p in crops)
    assert any((p[:, -1] == 200).all() for p in crops)


def test_half_of_the_samples_are_blurred_below_one_pixel(monkeypatch):
    radii = []
    monkeypatch.setattr(ImageFilter, "GaussianBlur", lambda radius: radii.append(radius) or BLUR(0))
    image = noise(16, 16)
    many(image, image % 2, 16, 16)
    assert 0.42 < len(radii) / 400 < 0.58
    assert 0 <= min(radii) < 0.1
    assert 0.9 < max(radii) < 1


def test_the_mask_is_never_blurred():
    mask = (noise(32, 32) > 250).astype(np.uint8)
    assert all(set(np.unique(m)) <= {0, 1} for _, m in many(noise(32, 32), mask, 32, 32, 40))


@pytest.mark.parametrize("channels", [(), (3,)])
def test_resize_is_bilinear_for_the_image_and_nearest_for_the_mask(channels):
    image, mask = noise(20, 30, *channels), noise(20, 30) % 2
    small, target = resize(image, mask, 16)
    assert small.shape == (16, 16, *channels)
    expected = Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(small, np.asarray(expected))
    expected = Image.fromarray(mask).resize((16, 16), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(target, np.asarray(expected))


def test_resize_to_the_same_size_changes_nothing():
    image, mask = noise(32, 32), noise(32, 32) % 2
    for given_array, resized in zip((image, mask), resize(image, mask, 32), strict=True):
        np.testing.assert_array_equal(resized, given_array)
