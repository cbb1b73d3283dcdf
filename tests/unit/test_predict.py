"""Detections in files of any size: what is found, where it is written, what is refused."""

import csv
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torch import nn

from mshnet import MSHNet, RequestError, api
from mshnet.predict import detections, find_images, predict
from mshnet.training import backend as backends

SIZE = 32


@pytest.fixture(scope="module")
def cpu():
    return backends.make_backend("cpu")


class Bright(nn.Module):
    """Stands in for a trained network: what is brighter than half is a target."""

    def forward(self, images, warm_flag):
        logits = 20 * images.mean(1, keepdim=True)  # normalised, so grey 117 or so is 0
        return [-logits, None, None, None], logits


def frame(path, height, width, *boxes, mode="L"):
    """A black image with white boxes (y, x, height, width)."""
    array = np.zeros((height, width), np.uint8)
    for y, x, h, w in boxes:
        array[y : y + h, x : x + w] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    if mode == "I;16":
        image = Image.fromarray(array.astype(np.uint16) * 16)
    elif mode != "L":
        image = image.convert(mode)
    image.save(path)
    return path


def mask_of(path):
    with Image.open(path) as image:
        assert image.mode == "L"
        return np.asarray(image)


# --- which files ---------------------------------------------------------------------------------


@pytest.fixture
def frames(tmp_path):
    for name in ("b.png", "a.JPG", "c.bmp", "notes.txt", "sub/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "inputs, expected",
    [
        (["."], ["a.JPG", "b.png", "c.bmp"]),
        (["c.bmp", "b.png"], ["c.bmp", "b.png"]),
        (["*.png"], ["b.png"]),
        (["**/*.png"], ["b.png", "sub/d.png"]),
        (["b.png", "."], ["b.png", "a.JPG", "c.bmp"]),
    ],
    ids=["folder", "files", "pattern", "recursive", "twice"],
)
def test_files_folders_and_patterns(frames, monkeypatch, inputs, expected):
    monkeypatch.chdir(frames)
    assert find_images(inputs) == [Path(name) for name in expected]


@pytest.mark.parametrize("wrong", ["nowhere.png", "*.tif", "empty"])
def test_what_names_no_image_is_refused(frames, wrong):
    (frames / "empty").mkdir()
    with pytest.raises(RequestError) as caught:
        find_images([str(frames / "b.png"), str(frames / wrong)])
    assert caught.value.code == "no-images"
    assert str(frames / wrong) in str(caught.value)


# --- from a probability map to a table -----------------------------------------------------------


def test_centres_areas_and_scores():
    probability = np.full((20, 30), 0.5, np.float32)  # 0.5 itself is not detected
    probability[2:4, 10:13] = 0.75
    probability[3, 11] = 0.9
    probability[15, 25] = probability[16, 26] = 0.51  # touching at a corner: one detection
    mask, rows = detections("x.png", probability)
    np.testing.assert_array_equal(mask, probability > 0.5)
    assert rows == [
        {"image": "x.png", "x": 11.0, "y": 2.5, "area": 6, "score": 0.9},
        {"image": "x.png", "x": 25.5, "y": 15.5, "area": 2, "score": 0.51},
    ]


def test_nothing_detected():
    mask, rows = detections("x.png", np.zeros((4, 4), np.float32))
    assert rows == []
    assert not mask.any()


# --- from files to files -------------------------------------------------------------------------


def test_detections_are_in_the_pixels_of_the_image(tmp_path, cpu):
    paths = [
        frame(tmp_path / "wide.png", 48, 96, (10, 60, 9, 12)),
        frame(tmp_path / "small.png", 16, 16, (2, 10, 4, 4)),
    ]
    rows = predict(Bright(), cpu, paths, tmp_path / "out", SIZE)
    assert [Path(row["image"]).name for row in rows] == ["wide.png", "small.png"]
    for row, (x, y, area) in zip(rows, [(65.5, 14, 108), (11.5, 3.5, 16)], strict=True):
        assert row["x"] == pytest.approx(x, abs=1)
        assert row["y"] == pytest.approx(y, abs=1)
        assert row["area"] == pytest.approx(area, rel=0.3)
        assert row["score"] > 0.99


def test_masks_and_overlays_have_the_images_own_size_in_every_mode(tmp_path, cpu):
    torch.manual_seed(0)
    model = MSHNet(widths=(4, 4, 8, 8, 8), depths=(1, 1, 1, 1, 1))
    sizes = {"L": (48, 33), "RGB": (20, 50), "P": (32, 32), "RGBA": (7, 90), "I;16": (64, 16)}
    paths = [
        frame(tmp_path / f"{i}.png", *size, (1, 2, 4, 4), mode=mode)
        for i, (mode, size) in enumerate(sizes.items())
    ]
    out = tmp_path / "deep" / "out"
    for channels in (1, 3):
        predict(model, cpu, paths, out, SIZE, channels, batch_size=2)
        for path, size in zip(paths, sizes.values(), strict=True):
            mask = mask_of(out / "masks" / path.name)
            assert mask.shape == size
            assert set(np.unique(mask)) <= {0, 255}
            with Image.open(out / "overlays" / path.name) as overlay:
                assert overlay.size == size[::-1]
                assert overlay.mode == "RGB"


def test_the_tables_agree_with_each_other_and_with_the_masks(tmp_path, cpu):
    model = MSHNet(widths=(4, 4, 8, 8, 8), depths=(1, 1, 1, 1, 1))
    nn.init.constant_(model.final.bias, 50)  # everything is a target
    paths = [frame(tmp_path / f"{i}.png", 20 + i, 30) for i in range(3)]
    out = tmp_path / "out"
    rows = predict(model, cpu, paths, out, SIZE, batch_size=2)
    assert rows == json.loads((out / "detections.json").read_text())
    with open(out / "detections.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in r.items()} for r in rows]
    assert [(r["x"], r["y"], r["area"]) for r in rows] == [
        (14.5, (19 + i) / 2, (20 + i) * 30) for i in range(3)
    ]
    assert all(mask_of(out / "masks" / f"{i}.png").all() for i in range(3))


def test_the_batch_size_changes_nothing(tmp_path, cpu):
    paths = [frame(tmp_path / f"{i}.png", 40, 40, (5 * i, 4 * i, 6, 6)) for i in range(5)]
    tables = [predict(Bright(), cpu, paths, tmp_path / "out", SIZE, batch_size=b) for b in (1, 3)]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 5


def test_weights_from_warm_up_use_the_full_size_head(tmp_path, cpu):
    path = frame(tmp_path / "x.png", SIZE, SIZE, (8, 8, 8, 8))
    fused, first = (
        predict(Bright(), cpu, [path], tmp_path / "out", SIZE, full=full) for full in (True, False)
    )
    assert fused[0]["area"] == 64
    assert first[0]["area"] == SIZE**2 - 64  # Bright's first head is the negative


def test_no_detections_leave_an_empty_table(tmp_path, cpu):
    out = tmp_path / "out"
    assert predict(Bright(), cpu, [frame(tmp_path / "x.png", 20, 20)], out, SIZE) == []
    assert (out / "detections.csv").read_text().split() == ["image,x,y,area,score"]
    assert json.loads((out / "detections.json").read_text()) == []


# --- names ---------------------------------------------------------------------------------------


def test_equal_names_in_two_folders_do_not_overwrite_each_other(tmp_path, cpu):
    paths = [
        frame(tmp_path / "one" / "x.png", 20, 20),
        frame(tmp_path / "two" / "x.png", 30, 30),
        frame(tmp_path / "two" / "x.bmp", 40, 40),
        frame(tmp_path / "three" / "one_x_0.png", 50, 50),
    ]
    predict(Bright(), cpu, paths, tmp_path / "out", SIZE)
    for part in ("masks", "overlays"):
        sides = []
        for path in (tmp_path / "out" / part).iterdir():
            with Image.open(path) as image:
                sides.append(image.width)
        assert sorted(sides) == [20, 30, 40, 50]


def test_the_table_tells_equal_names_apart(tmp_path, cpu):
    paths = [frame(tmp_path / part / "x.png", 20, 20, (5, 5, 6, 6)) for part in ("one", "two")]
    rows = predict(Bright(), cpu, paths, tmp_path / "out", SIZE)
    assert len(rows) == 2
    assert rows[0]["image"] != rows[1]["image"]


def test_a_name_that_is_no_utf_8_keeps_its_bytes(tmp_path, cpu):
    name = os.fsdecode(b"fr\xff\xe9me.png")
    path = frame(tmp_path / name, SIZE, SIZE, (8, 8, 8, 8))
    out = tmp_path / "out"
    rows = predict(Bright(), cpu, [path], out, SIZE)
    assert [row["image"] for row in rows] == [str(path)]
    assert sorted(p.name for p in (out / "masks").iterdir()) == [name]
    assert os.fsencode(path) in (out / "detections.csv").read_bytes()
    (row,) = json.loads((out / "detections.json").read_text())
    assert os.fsencode(row["image"]) == os.fsencode(path)


# --- from weights and a request ------------------------------------------------------------------


@pytest.fixture
def request_for(tmp_path):
    """Runs `mshnet predict` with a small network's weights."""
    sizes = {"widths": (2, 2, 4, 4, 4), "depths": (1, 1, 1, 1, 1)}
    torch.save(MSHNet(**sizes).state_dict(), tmp_path / "weight.pkl")
    settings = {"weight_path": str(tmp_path / "weight.pkl"), "device": "cpu", "base_size": SIZE}

    def run(inputs, out):
        return api.predict_files(settings | sizes | {"batch_size": 2}, inputs, out, lambda _: None)

    return run


def test_each_image_is_decoded_once(tmp_path, request_for, monkeypatch):
    for i in range(5):
        frame(tmp_path / "in" / f"{i}.png", 40, 40, (5, 5, 6, 6), mode="RGB")
    decoded, prepare = Counter(), PngImagePlugin.PngImageFile.load_prepare

    def count(image):
        decoded[image.fp.name] += 1
        prepare(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_prepare", count)
    request_for([str(tmp_path / "in")], tmp_path / "out")
    assert decoded == {str(tmp_path / "in" / f"{i}.png"): 1 for i in range(5)}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("part", ["masks", "overlays"])
@pytest.mark.parametrize("link", [False, True])
def test_an_output_never_replaces_an_input(tmp_path, request_for, part, link):
    frame(tmp_path / "shots" / part / "a.png", 20, 20)
    frame(tmp_path / "b.png", 20, 20)
    inputs = tmp_path / "shots" / part
    if link:
        (tmp_path / "by another name").symlink_to(inputs)
        inputs = tmp_path / "by another name"
    before = contents(tmp_path)
    with pytest.raises(RequestError) as caught:
        request_for([str(tmp_path / "b.png"), str(inputs)], tmp_path / "shots")
    assert caught.value.code == "output-is-input"
    assert str(tmp_path / "shots" / part / "a.png") in str(caught.value)
    assert contents(tmp_path) == before


def test_an_output_that_is_a_link_to_an_input(tmp_path, request_for):
    path = frame(tmp_path / "a.png", 20, 20)
    (tmp_path / "out" / "masks").mkdir(parents=True)
    (tmp_path / "out" / "masks" / "a.png").symlink_to(path)
    with pytest.raises(RequestError) as caught:
        request_for([str(path)], tmp_path / "out")
    assert caught.value.code == "output-is-input"


def test_a_damaged_image_is_found_before_anything_is_written(tmp_path, request_for):
    frame(tmp_path / "a.png", 20, 20)
    wrong = bytearray(frame(tmp_path / "b.png", 20, 20, (2, 2, 5, 5)).read_bytes())
    wrong[-20] ^= 1
    (tmp_path / "b.png").write_bytes(wrong)
    with pytest.raises(RequestError) as caught:
        request_for([str(tmp_path / "a.png"), str(tmp_path / "b.png")], tmp_path / "out")
    assert caught.value.code == "damaged-file"
    assert str(tmp_path / "b.png") in str(caught.value)
    assert not (tmp_path / "out").exists()


# --- wrong requests ------------------------------------------------------------------------------


def test_an_output_that_is_a_file_is_refused(tmp_path, cpu):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RequestError) as caught:
        predict(Bright(), cpu, [frame(tmp_path / "x.png", 20, 20)], tmp_path / "out", SIZE)
    assert caught.value.code == "unwritable"
    assert str(tmp_path / "out") in str(caught.value)
    assert (tmp_path / "out").read_text() == "mine"


def test_an_unreadable_image_is_named_and_what_came_before_stays(tmp_path, cpu):
    good = frame(tmp_path / "a.png", 20, 20, (2, 2, 5, 5))
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(RequestError) as caught:
        predict(Bright(), cpu, [good, tmp_path / "b.png"], tmp_path / "out", SIZE, batch_size=1)
    assert str(tmp_path / "b.png") in str(caught.value)
    assert (tmp_path / "out" / "masks" / "a.png").is_file()
