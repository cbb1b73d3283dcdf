"""Metrics against an independent implementation, naive counts and constructed cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mshnet import DetectionMetrics
from mshnet.metrics import match, regions

SIZE = 24
MANY = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def oracle():
    return pytest.importorskip(
        "py_irstd_metrics",
        reason="pip install --no-deps pyirstdmetrics==1.0.2 (its pin of numpy below 2 is not "
        "needed, but keeps it out of the test extra)",
    )


# --- random blob maps ----------------------------------------------------------------------------

_side = st.integers(1, 5)
_place = st.integers(0, SIZE - 1)
_blob = st.tuples(_place, _place, _side, _side)


@st.composite
def samples(draw, least_targets=1):
    """Logits float32 and masks bool, (B, 24, 24): blobs, half of the predictions near a target."""
    logits, masks = [], []
    for _ in range(draw(st.integers(1, 4))):
        targets = draw(st.lists(_blob, min_size=least_targets, max_size=4))
        near = [
            (abs(y + dy), abs(x + dx), h, w)
            for y, x, h, w in targets
            for dy, dx in [draw(st.sampled_from([(0, 0), (1, 0), (2, -2), (0, 3), (-4, 1)]))]
        ]
        alarms = draw(st.lists(_blob, max_size=3))
        mask, found = np.zeros((2, SIZE, SIZE), bool)
        for blobs, canvas in ((targets, mask), (near + alarms, found)):
            for y, x, h, w in blobs:
                canvas[y : y + h, x : x + w] = True
        # Few values, so that probabilities fall on thresholds and repeat.
        noise = np.random.default_rng(draw(st.integers(0, 99))).choice([0, 0.25, 3], found.shape)
        logits.append(np.where(found, 0.125 + noise, -noise).astype(np.float32))
        masks.append(mask)
    return np.stack(logits), np.stack(masks)


def measure(logits, masks, definition="corrected"):
    metrics = DetectionMetrics(masks.shape[-2:], definition)
    metrics.update(logits, masks)
    return metrics.compute()


def probability(logits):
    return torch.sigmoid(torch.from_numpy(logits)).numpy()


@MANY
@given(maps=samples())
def test_pd_and_fa_agree_with_an_independent_implementation(oracle, maps):
    logits, masks = maps
    theirs = oracle.ProbabilityDetectionAndFalseAlarmRate(num_bins=1, distance_threshold=3)
    for p, mask in zip(probability(logits), masks, strict=True):
        theirs.update(p, mask)
    expected, ours = theirs.get(), measure(logits, masks)
    assert ours["pd"] == expected["probability_detection"][0]
    assert ours["fa"] == expected["false_alarm"][0]


@MANY
@given(maps=samples())
def test_pixel_metrics_agree_with_an_independent_implementation(oracle, maps):
    logits, masks = maps
    theirs = oracle.CMMetrics()
    options = {"with_dynamic": False, "with_binary": True}
    theirs.add_handler("iou", oracle.IoUHandler(**options, sample_based=False))
    theirs.add_handler("niou", oracle.IoUHandler(**options, sample_based=True))
    theirs.add_handler("pixel_accuracy", oracle.RecallHandler(**options, sample_based=False))
    for p, mask in zip(probability(logits), masks, strict=True):
        theirs.update(p, mask)
    ours = measure(logits, masks)
    for name, value in theirs.get().items():
        assert ours[name] == pytest.approx(float(value["binary"]), rel=1e-12), name


@MANY
@given(maps=samples(least_targets=0))
def test_roc_is_the_count_above_each_threshold(maps):
    logits, masks = maps
    roc = measure(logits, masks)["roc"]
    p = torch.sigmoid(torch.from_numpy(logits))
    mask = torch.from_numpy(masks)
    assert roc["thresholds"] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    for threshold, tpr, fpr in zip(*roc.values(), strict=True):
        above = p > threshold
        assert tpr == pytest.approx(int((above & mask).sum()) / (int(mask.sum()) + 0.001))
        assert fpr == pytest.approx(int((above & ~mask).sum()) / (int((~mask).sum()) + 0.001))


def test_a_probability_on_a_threshold_does_not_pass_it():
    roc = measure(np.zeros((1, 8, 8), np.float32), np.ones((1, 8, 8)))["roc"]  # sigmoid(0) = 0.5
    passed = [t for t, tpr in zip(roc["thresholds"], roc["tpr"], strict=True) if tpr > 0]
    assert passed == [0.0, 0.1, 0.2, 0.3, 0.4]


# --- definitions ---------------------------------------------------------------------------------


def boxes(*places, size=SIZE):
    """A bool map with boxes (y, x, height, width)."""
    canvas = np.zeros((1, size, size), bool)
    for y, x, h, w in places:
        canvas[0, y : y + h, x : x + w] = True
    return canvas


def test_officially_a_false_alarm_as_large_as_a_hit_vanishes():
    target = boxes((2, 2, 2, 3))
    found = boxes((2, 2, 2, 3), (12, 12, 3, 2), (20, 2, 1, 4))  # a hit of 6 px, alarms of 6 and 4
    logits = np.where(found, 5.0, -5.0)
    corrected, official = (measure(logits, target, d) for d in ("corrected", "official"))
    assert corrected["fa"] == (6 + 4) / SIZE**2
    assert official["fa"] == 4 / SIZE**2
    assert corrected["pd"] == official["pd"] == 1


def test_the_other_definition_comes_from_the_same_pass():
    metrics = DetectionMetrics(SIZE, "official")
    target = boxes((2, 2, 2, 3))
    metrics.update(np.where(target | boxes((12, 12, 3, 2)), 5.0, -5.0), target)
    assert metrics.compute()["fa"] == 0
    assert metrics.compute("corrected")["fa"] == 6 / SIZE**2
    assert metrics.compute()["fa"] == 0


@MANY
@given(maps=samples(least_targets=0))
def test_the_official_fa_is_never_higher(maps):
    corrected, official = (measure(*maps, d) for d in ("corrected", "official"))
    assert official.pop("fa") <= corrected.pop("fa")
    assert str(official) == str(corrected)  # as text: NaN differs from itself


# --- matching ------------------------------------------------------------------------------------


def test_of_two_targets_the_first_takes_the_only_prediction():
    targets = np.array([[10.0, 10.0], [11.0, 12.0]])
    prediction = np.array([[11.0, 12.0]])  # exactly on the second
    assert match(targets, prediction) == [(0, 0)]


def test_a_target_takes_the_first_prediction_in_reach_and_leaves_the_rest():
    targets = np.array([[10.0, 10.0], [10.0, 14.0]])
    predictions = np.array([[0.0, 0.0], [10.0, 12.0], [10.0, 10.0]])
    assert match(targets, predictions) == [(0, 1)]


@pytest.mark.parametrize("offset, matched", [((0, 3), False), ((0, 2), True), ((2, 2), True)])
def test_three_pixels_away_is_no_match(offset, matched):
    pairs = match(np.array([[5.0, 5.0]]), np.array([[5.0, 5.0]]) + offset)
    assert pairs == ([(0, 0)] if matched else [])


def test_a_region_three_pixels_away_is_a_miss_and_a_false_alarm():
    result = measure(np.where(boxes((5, 8, 1, 1)), 1.0, -1.0), boxes((5, 5, 1, 1)))
    assert result["pd"] == 0
    assert result["fa"] == 1 / SIZE**2


@pytest.mark.parametrize("targets, predictions", [(0, 2), (2, 0), (0, 0)])
def test_nothing_to_match(targets, predictions):
    assert match(np.zeros((targets, 2)), np.zeros((predictions, 2))) == []


def test_regions_touch_at_corners_and_come_in_raster_order():
    mask = boxes((10, 3, 1, 1), (11, 4, 1, 1), (2, 8, 3, 1))[0]
    labels, areas, centroids = regions(mask)
    assert areas.tolist() == [3, 2]
    assert centroids.tolist() == [[3, 8], [10.5, 3.5]]
    assert labels[2, 8] == 1
    assert labels[10, 3] == labels[11, 4] == 2


# --- accumulation --------------------------------------------------------------------------------


@MANY
@given(maps=samples(least_targets=0), data=st.data())
def test_neither_batches_nor_order_matter(maps, data):
    logits, masks = maps
    at_once = measure(logits, masks)
    in_parts = DetectionMetrics(SIZE)
    for i in data.draw(st.permutations(range(len(logits)))):
        in_parts.update(logits[i : i + 1], masks[i : i + 1])
    parts = in_parts.compute()
    assert parts.pop("roc") == at_once.pop("roc")
    assert parts == pytest.approx(at_once, nan_ok=True)


def test_shapes_and_kinds_of_input_give_the_same_numbers():
    target = boxes((2, 2, 3, 3))
    logits = np.where(boxes((3, 2, 3, 3), (15, 15, 2, 2)), 2.0, -2.0).astype(np.float32)
    expected = measure(logits, target)
    assert measure(logits[:, None], target[:, None]) == expected
    assert measure(torch.from_numpy(logits).bfloat16(), torch.from_numpy(target)) == expected
    assert measure(logits, target.astype(np.uint8) * 255) == expected
    tracked = torch.from_numpy(logits).requires_grad_()
    assert measure(tracked, target.astype(np.float64)) == expected


def test_maps_need_not_be_square():
    metrics = DetectionMetrics((16, 32))
    target = np.zeros((2, 1, 16, 32))
    target[:, :, 3:5, 20:22] = 1
    metrics.update(-np.ones_like(target), target)
    metrics.update(np.ones_like(target), target)
    result = metrics.compute()
    assert result["iou"] == (2 * 4) / (2 * 4 + 2 * 512)
    assert result["fa"] == 2 * 512 / (4 * 512)  # the full map's centre is far from the target


def test_reset_forgets_everything():
    metrics = DetectionMetrics(SIZE)
    metrics.update(np.ones((3, SIZE, SIZE)), boxes((2, 2, 2, 2)).repeat(3, 0))
    metrics.reset()
    target = boxes((5, 5, 3, 3))
    metrics.update(np.where(target, 1.0, -1.0), target)
    assert metrics.compute() == measure(np.where(target, 1.0, -1.0), target)


# --- nothing there -------------------------------------------------------------------------------


def test_nothing_to_find_and_nothing_found_is_a_perfect_image():
    result = measure(-np.ones((2, SIZE, SIZE)), np.zeros((2, SIZE, SIZE)))
    assert result["niou"] == 1
    assert result["fa"] == 0
    assert all(math.isnan(result[name]) for name in ("iou", "pixel_accuracy", "pd"))


def test_a_false_alarm_on_an_empty_image_has_no_overlap():
    empty, target = np.zeros((1, SIZE, SIZE), bool), boxes((5, 5, 3, 3))
    logits = np.where(np.concatenate([boxes((9, 9, 2, 2)), target]), 1.0, -1.0)
    result = measure(logits, np.concatenate([empty, target]))
    assert result["niou"] == 0.5
    assert result["iou"] == 9 / 13
    assert result["pd"] == 1
    assert result["fa"] == 4 / (2 * SIZE**2)


@MANY
@given(st.lists(samples(least_targets=0), min_size=2, max_size=3))
def test_parts_that_are_packed_and_added_up_are_the_whole(parts):
    whole, packed = DetectionMetrics(SIZE), []
    for logits, masks in parts:
        whole.update(logits, masks)
        part = DetectionMetrics(SIZE)
        part.update(logits, masks)
        packed.append(part.pack())
    together = DetectionMetrics(SIZE)
    together.unpack(sum(packed))
    for definition in ("corrected", "official"):
        ours, theirs = together.compute(definition), whole.compute(definition)
        assert ours.pop("niou") == pytest.approx(theirs.pop("niou"), rel=1e-12)  # a sum's order
        np.testing.assert_equal(ours, theirs)


# --- wrong requests ------------------------------------------------------------------------------


def test_no_numbers_without_images():
    with pytest.raises(ValueError, match="no image was added"):
        DetectionMetrics(SIZE).compute()


@pytest.mark.parametrize(
    "logits, target",
    [((1, 1, 24, 24), (1, 24, 24)), ((2, 24, 24), (1, 24, 24)), ((1, 16, 16), (1, 16, 16))],
)
def test_wrong_shapes_are_refused(logits, target):
    with pytest.raises(ValueError, match="must both be") as caught:
        DetectionMetrics(SIZE).update(np.zeros(logits), np.zeros(target))
    assert str(logits) in str(caught.value)


def test_an_unknown_definition_is_refused():
    with pytest.raises(ValueError, match="corrected, official"):
        DetectionMetrics(SIZE, "fair")
    metrics = DetectionMetrics(SIZE)
    metrics.update(np.ones((1, SIZE, SIZE)), np.ones((1, SIZE, SIZE)))
    with pytest.raises(ValueError, match="corrected, official"):
        metrics.compute("fair")
