"""The pictures of a run: there, and coloured as they say."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from mshnet import plots
from mshnet.plots import FALSE_ALARM, HIT, MISSED


def record(epoch, **changes):
    values = {"epoch": epoch, "loss": 1 / (epoch + 1), "iou": 0.5, "niou": 0.6, "pd": 0.9}
    phase = "full" if epoch > 1 else "warm-up"
    return values | {"fa": 1e-5, "phase": phase} | changes


def map_of(*boxes, size=40):
    canvas = np.zeros((size, size), bool)
    for y, x, h, w in boxes:
        canvas[y : y + h, x : x + w] = True
    return canvas


def png_size(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.size


# --- curves --------------------------------------------------------------------------------------


def test_curves_are_saved(tmp_path):
    plots.curves([record(e) for e in range(4)], tmp_path / "curves.png")
    width, height = png_size(tmp_path / "curves.png")
    assert width > height > 300


def test_curves_show_the_records():
    figure = plots.curves([record(e, iou=0.1 * e, fa=1e-6 * (e + 1)) for e in range(4)])
    loss, overlap, detection, alarms = figure.axes
    assert loss.lines[0].get_xydata().tolist() == [[1, 1], [2, 1 / 2], [3, 1 / 3], [4, 1 / 4]]
    np.testing.assert_allclose(overlap.lines[0].get_ydata(), [0, 10, 20, 30])
    np.testing.assert_allclose(overlap.lines[1].get_ydata(), 60)
    np.testing.assert_allclose(detection.lines[0].get_ydata(), 90)
    np.testing.assert_allclose(alarms.lines[0].get_ydata(), [1, 2, 3, 4])


def test_a_dotted_line_marks_the_end_of_the_warm_up():
    figure = plots.curves([record(e) for e in range(4)])
    for axis in figure.axes[:3]:
        (dotted,) = [line for line in axis.lines if line.get_linestyle() == ":"]
        assert set(dotted.get_xdata()) == {2.5}
    warm_only = plots.curves([record(e) for e in range(2)])
    assert [x for axis in warm_only.axes for x in axis.lines if x.get_linestyle() == ":"] == []


@pytest.mark.parametrize("value", [None, "lacking", "text", [], 1e38, float("nan"), -3])
def test_what_could_not_be_measured_leaves_a_gap(tmp_path, value):
    """A log holds null for NaN (no target, a loss that diverged); an edited one may lack it."""
    keys = ("iou", "loss", "niou", "pd", "fa", "phase")
    records = [record(number, **{key: value}) for number, key in enumerate(keys)]
    if value == "lacking":
        for changed, key in zip(records, keys, strict=True):
            del changed[key]
    figure = plots.curves(records, tmp_path / "curves.png")
    assert png_size(tmp_path / "curves.png")
    if not isinstance(value, float | int):
        assert np.isnan(figure.axes[1].lines[0].get_ydata()[0])


def test_no_false_alarms_are_drawn_at_the_lower_end():
    alarms = plots.curves([record(0, fa=0.0)]).axes[3]
    assert alarms.lines[0].get_ydata().tolist() == [0.1]


# --- examples ------------------------------------------------------------------------------------


@pytest.fixture
def marked():
    """Patches of a picture with one hit, one miss and one false alarm."""
    mask = map_of((5, 5, 3, 3), (30, 8, 3, 3))
    prediction = map_of((5, 6, 3, 3), (20, 30, 2, 2))
    image = np.zeros(mask.shape, np.uint8)
    return plots.examples([image], [mask], [prediction], ["x"]).axes[3].patches


def test_hits_misses_and_false_alarms_have_their_colours(marked):
    found = {to_hex(circle.get_edgecolor()): circle.center for circle in marked}
    assert len(marked) == 3
    assert tuple(found[HIT]) == (6, 6)  # x, y of the target
    assert tuple(found[MISSED]) == (9, 31)
    assert tuple(found[FALSE_ALARM]) == (30.5, 20.5)


def test_circles_surround_and_do_not_cover(marked):
    for circle in marked:
        assert not circle.get_fill()
        assert circle.radius > 1.5


def test_examples_have_a_row_an_image(tmp_path):
    colour = np.zeros((40, 40, 3), np.uint8)
    masks = [map_of((5, 5, 3, 3)), map_of()]
    figure = plots.examples(
        [colour, colour[..., 0]], masks, masks, ["first", "second"], tmp_path / "examples.png"
    )
    assert [axis.get_ylabel() for axis in figure.axes[::4]] == ["first", "second"]
    titles = [axis.get_title() for axis in figure.axes[:4]]
    assert titles[:3] == ["image", "mask", "prediction"]
    assert titles[3] == "green hit, orange missed, red false alarm"
    assert [len(axis.patches) for axis in figure.axes[3::4]] == [1, 0]
    width, height = png_size(tmp_path / "examples.png")
    assert 0.4 < height / width < 0.8


# --- overlay -------------------------------------------------------------------------------------


def test_the_outline_is_red_and_leaves_the_target_visible():
    image = np.random.default_rng(0).integers(0, 200, (20, 20, 3), np.uint8)
    before = image.copy()
    mask = map_of((5, 5, 4, 4), size=20)
    picture = plots.overlay(image, mask)
    np.testing.assert_array_equal(image, before)
    np.testing.assert_array_equal(picture[mask], image[mask])
    red = (picture == (255, 69, 58)).all(-1)
    ring = map_of((4, 4, 6, 6), size=20) & ~mask
    assert not (red & ~ring).any()
    assert (red & ring).sum() >= 16
    np.testing.assert_array_equal(picture[~red], image[~red])


def test_no_detection_no_outline():
    image = np.full((8, 8, 3), 9, np.uint8)
    np.testing.assert_array_equal(plots.overlay(image, np.zeros((8, 8), bool)), image)
