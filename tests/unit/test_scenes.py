"""The built-in scenes: reproducible, well-formed, findable, and not solved by a threshold."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from mshnet.data import scenes
from mshnet.data.scenes import render_scene, write_scenes

EIGHT = np.ones((3, 3))  # targets are 8-connected regions, as the metrics count them
SEEDS = st.integers(0, 2**32)
INDICES = st.integers(0, 2**20)
# Every 16th pixel of scenes 0, 1 and the first of the test split, seed 0, 64×64.
PIXELS = [
    [[157, 201, 187, 175], [104, 22, 26, 23], [24, 21, 21, 19], [62, 110, 26, 32]],
    [[83, 89, 89, 88], [101, 97, 100, 98], [124, 152, 126, 121], [125, 125, 119, 113]],
    [[51, 133, 45, 76], [67, 137, 172, 55], [118, 105, 103, 114], [132, 129, 130, 133]],
]


def targets_of(mask):
    labels, count = ndimage.label(mask > 0, EIGHT)
    return labels, count


@pytest.fixture(scope="module")
def forty():
    """40 scenes as (images, masks), uint8 (40, 256, 256) and bool of the same shape."""
    images, masks = zip(*(render_scene(0, i) for i in range(40)), strict=True)
    return np.stack(images), np.stack(masks) > 0


# --- one scene -----------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, index=INDICES, size=st.sampled_from([32, 57, 96]))
def test_same_arguments_same_scene(seed, index, size):
    first, second = render_scene(seed, index, size), render_scene(seed, index, size)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_the_pixels_of_a_version_stay():
    """Other pixels need another VERSION; one grey level is left to other mathematical libraries."""
    rows = [render_scene(0, index, 64)[0][::16, ::16] for index in (0, 1, scenes._TEST_START)]
    np.testing.assert_allclose(np.int64(rows), PIXELS, atol=1)


def test_drawing_order_does_not_matter():
    alone = render_scene(3, 5, 64)[0]
    render_scene(3, 4, 64)
    np.testing.assert_array_equal(alone, render_scene(3, 5, 64)[0])


def test_seed_and_index_each_change_the_scene():
    base = render_scene(0, 0, 64)[0]
    assert (render_scene(1, 0, 64)[0] != base).mean() > 0.5
    assert (render_scene(0, 1, 64)[0] != base).mean() > 0.5


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, index=INDICES, size=st.sampled_from([32, 33, 64, 128, 200]))
def test_image_and_mask_are_well_formed(seed, index, size):
    image, mask = render_scene(seed, index, size)
    assert image.shape == mask.shape == (size, size)
    assert image.dtype == mask.dtype == np.uint8
    assert set(np.unique(mask)) == {0, 255}
    labels, count = targets_of(mask)
    assert 1 <= count <= scenes.MAX_TARGETS
    for rows, cols in ndimage.find_objects(labels):
        assert max(rows.stop - rows.start, cols.stop - cols.start) <= 9
        assert min(rows.start, cols.start) >= 3
        assert max(rows.stop, cols.stop) <= size - 3
    for label in range(1, count + 1):
        others = (labels > 0) & (labels != label)
        grown = ndimage.binary_dilation(labels == label, EIGHT, iterations=scenes.GAP)
        assert not (grown & others).any()


def test_target_sizes_reach_from_a_pixel_or_two_to_nine_across(forty):
    areas = np.concatenate([np.bincount(targets_of(m)[0].ravel())[1:] for m in forty[1]])
    assert areas.min() <= 3
    assert areas.max() >= 25
    assert areas.max() <= 80


def test_the_psf_keeps_all_light():
    share = scenes._pixel_psf(np.array([0.0, 0.37, -2.2]), 0.8)
    np.testing.assert_allclose(share.sum(axis=1), 1.0, atol=1e-9)
    centroid = share @ np.arange(-10, 11)
    np.testing.assert_allclose(centroid, [0.0, 0.37, -2.2], atol=1e-5)


def test_field_has_the_spectrum_asked_for():
    field = scenes._field(np.random.default_rng(0), 256, 256, beta=3.0)
    power = np.abs(np.fft.rfft2(field))[:128, :128] ** 2
    radius = np.hypot(*np.mgrid[:128, :128])
    octaves = [power[(radius >= r) & (radius < 2 * r)].mean() for r in (8, 16, 32)]
    slopes = np.diff(np.log2(octaves))
    np.testing.assert_allclose(slopes, -3.0, atol=0.5)


@pytest.mark.parametrize("arguments", [(0, 0, 31), (-1, 0, 64), (0, -1, 64)])
def test_impossible_arguments(arguments):
    with pytest.raises(ValueError, match=r"31|-1"):
        render_scene(*arguments)


# --- difficulty ----------------------------------------------------------------------------------


def best_threshold_iou(image, mask):
    """IoU of ``image >= t`` with ``mask`` at the best t of all, chosen knowing the answer."""
    hits = np.bincount(image[mask], minlength=256)[::-1].cumsum()
    alarms = np.bincount(image[~mask], minlength=256)[::-1].cumsum()
    return (hits / (mask.sum() + alarms)).max()


def test_no_threshold_finds_the_targets(forty):
    images, masks = forty
    assert best_threshold_iou(images, masks) < 0.1
    per_image = [best_threshold_iou(i, m) for i, m in zip(images, masks, strict=True)]
    assert np.mean(per_image) < 0.4


def test_local_contrast_stands_out_at_the_targets(forty):
    """A blob filter answers far above its usual clutter: the targets are there to be found."""
    above_median, rank = [], []
    for image, mask in zip(*forty, strict=True):
        image = image.astype(np.float32)
        blob = ndimage.gaussian_filter(image, 1.0) - ndimage.gaussian_filter(image, 4.0)
        clutter = np.sort(np.abs(blob[~mask]))
        labels, count = targets_of(mask)
        peaks = ndimage.maximum(blob, labels, np.arange(1, count + 1))
        above_median.extend(peaks / np.median(clutter))
        rank.extend(np.searchsorted(clutter, peaks) / clutter.size)
    assert np.median(above_median) > 8
    assert np.mean(np.array(above_median) > 4) > 0.9
    assert np.median(rank) > 0.97


# --- a set on disk -------------------------------------------------------------------------------


def write(folder, **changes):
    arguments = {"train": 3, "test": 2, "size": 32, "seed": 7, "progress": False}
    return write_scenes(folder, **(arguments | changes))


def state(folder):
    return {f: f.stat().st_mtime_ns for f in folder.rglob("*") if f.is_file()}


def test_layout(tmp_path):
    folder = write(tmp_path / "new" / "scenes")
    train = (folder / "trainval.txt").read_text().split()
    test = (folder / "test.txt").read_text().split()
    assert (len(train), len(test)) == (3, 2)
    assert not set(train) & set(test)
    for part in ("images", "masks"):
        assert sorted(f.name for f in (folder / part).iterdir()) == sorted(
            f"{name}.png" for name in train + test
        )
    with Image.open(folder / "images" / f"{train[1]}.png") as image:
        assert image.mode == "L"
        np.testing.assert_array_equal(np.asarray(image), render_scene(7, 1, 32)[0])
    with Image.open(folder / "masks" / f"{train[1]}.png") as mask:
        np.testing.assert_array_equal(np.asarray(mask), render_scene(7, 1, 32)[1])
    about = json.loads((folder / "scenes.json").read_text())
    assert (about["train"], about["test"], about["size"], about["seed"]) == (3, 2, 32, 7)


def test_a_second_call_changes_nothing(tmp_path, monkeypatch):
    folder = write(tmp_path)
    before = state(folder)
    monkeypatch.setattr(scenes, "_write_png", None)  # any drawing to disk would now fail
    assert write(tmp_path) == folder
    assert state(folder) == before


def test_an_interrupted_write_is_completed(tmp_path, monkeypatch):
    whole = write(tmp_path / "whole")
    put, calls = scenes._write_png, []

    def stop_after_three(path, pixels):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(path)
        put(path, pixels)

    monkeypatch.setattr(scenes, "_write_png", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "part")
    assert not (tmp_path / "part" / "trainval.txt").exists()
    monkeypatch.setattr(scenes, "_write_png", put)
    part = write(tmp_path / "part")
    files = {f.relative_to(whole) for f in state(whole)}
    assert {f.relative_to(part) for f in state(part)} == files
    assert all((whole / f).read_bytes() == (part / f).read_bytes() for f in files)


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_file_that_is_lost_or_emptied_by_a_power_cut_is_drawn_again(tmp_path, lose):
    folder = write(tmp_path)
    lost = next((folder / "masks").iterdir())
    content = lost.read_bytes()
    lose(lost)
    write(tmp_path)
    assert lost.read_bytes() == content


def test_more_training_scenes_leave_the_test_scenes_alone(tmp_path):
    few, many = write(tmp_path / "few"), write(tmp_path / "many", train=5)
    for name in (few / "test.txt").read_text().split():
        file = f"images/{name}.png"
        assert (few / file).read_bytes() == (many / file).read_bytes()


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError) as caught:
        write(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("change", [{"seed": 8}, {"size": 64}, {"train": 4}])
def test_a_folder_with_other_scenes_is_refused(tmp_path, change):
    before = state(write(tmp_path))
    with pytest.raises(ValueError) as caught:
        write(tmp_path, **change)
    assert str(tmp_path) in str(caught.value)
    assert state(tmp_path) == before


def test_an_unreadable_card_is_refused(tmp_path):
    (tmp_path / "scenes.json").write_text("{")
    with pytest.raises(ValueError) as caught:
        write(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("change", [{"train": 0}, {"test": 0}, {"size": 8}, {"seed": -1}])
def test_nothing_is_written_for_impossible_arguments(tmp_path, change):
    with pytest.raises(ValueError):
        write(tmp_path / "set", **change)
    assert not (tmp_path / "set").exists()
