"""check-data: on a set with one of each defect, and on the real SIRST."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from mshnet import RequestError
from mshnet.data.check import check, table
from mshnet.data.source import open_split


def edit(path, change):
    with Image.open(path) as image:
        array = np.asarray(image)
    Image.fromarray(change(array)).save(path)


@pytest.fixture
def clean(tiny_dataset):
    return tiny_dataset(train=4, test=2)


@pytest.fixture
def faulty(tiny_dataset):
    """One of each: ten training and four test names."""
    folder = tiny_dataset(train=10, test=3)
    images, masks = folder / "images", folder / "masks"
    (images / "train_1.png").unlink()
    (masks / "train_2.png").unlink()
    content = (images / "train_3.png").read_bytes()
    (images / "train_3.png").write_bytes(content[: len(content) // 2])
    edit(masks / "train_4.png", lambda m: m[:16])
    edit(masks / "train_5.png", lambda m: np.where(m > 0, np.uint8(253), np.uint8(7)))
    edit(masks / "train_6.png", lambda m: m * 0)
    edit(images / "train_7.png", lambda i: np.stack([i, i // 2, i], -1))
    edit(images / "train_8.png", lambda i: np.stack([i, i, i], -1))  # RGB, but grey
    with open(folder / "trainval.txt", "a") as file:
        file.write("train_0.png\n")  # twice
    with open(folder / "test.txt", "a") as file:
        file.write("train_9\n")  # in train, too
    for part in (images, masks):  # test_1 is train_0 under another name
        (part / "test_1.png").write_bytes((part / "train_0.png").read_bytes())
    return folder


def test_a_clean_set(clean):
    report = check(clean)
    assert report.errors() == []
    assert report.shared_names == report.shared_content == []
    train = report.splits["train"]
    assert train.images == 4
    assert train.sizes == {"32×32": 4}
    assert train.modes == train.mask_modes == {"L": 4}
    assert len(train.targets) == 4
    assert train.areas == [9] * sum(train.targets)
    assert train.touched == train.empty == train.repeated == train.missing == train.unusable == []
    assert train.coloured == 0
    assert table(report).endswith("ready for training")


def test_each_defect_is_counted_under_its_name(faulty):
    train = check(faulty).splits["train"]
    assert train.images == 11
    assert train.missing == ["train_1 has no image", "train_2 has no mask"]
    truncated, mismatched = train.unusable
    assert str(faulty / "images" / "train_3.png") in truncated
    assert str(faulty / "masks" / "train_4.png") in mismatched
    assert "32×16" in mismatched
    assert train.touched == ["train_5"]
    assert train.empty == ["train_6"]
    assert train.coloured == 1
    assert train.repeated == ["train_0"]
    assert train.sizes == {"32×32": 7}
    assert train.modes["RGB"] == 2
    assert len(train.targets) == 7
    assert train.targets.count(0) == 1


def test_duplicates_across_the_splits(faulty):
    report = check(faulty)
    assert report.shared_names == ["train_9"]
    assert report.shared_content == ["train_0 = test_1"]


def test_errors_are_what_training_stops_at_and_nothing_else(faulty):
    errors = check(faulty).errors()
    assert len(errors) == 4
    assert all(line.startswith("train: ") and "\n" not in line for line in errors)
    for name in ("train_1", "train_2", "train_3", "train_4"):
        assert sum(name in line for line in errors) == 1


def test_the_table_names_every_finding(faulty):
    text = table(check(faulty))
    for line in (
        "train: not binary, cut at half of the file type's maximum: train_5 (1 masks)",
        "train: no target in train_6 (1 masks)",
        "train: colour in 1 of 11 images",
        "warning: train: the list repeats train_0",
        "warning: in train and test: train_9",
        "warning: same picture in train and test: train_0 = test_1",
        "error: train: missing: train_1 has no image",
        "error: train: missing: train_2 has no mask",
        "training would stop at these errors",
    ):
        assert line in text
    listed = next(line for line in text.splitlines() if line.startswith("images listed"))
    assert listed.split() == ["images", "listed", "11", "4"]


def test_the_report_as_json_holds_the_same(faulty):
    report = check(faulty)
    values = json.loads(json.dumps(report.as_dict()))
    assert values["errors"] == report.errors()
    assert values["shared_names"] == ["train_9"]
    assert values["splits"]["train"]["sizes"] == {"32×32": 7}
    assert values["splits"]["train"]["touched"] == ["train_5"]
    assert sum(values["splits"]["test"]["targets"]) == len(values["splits"]["test"]["areas"])


def test_long_lists_are_shortened_in_the_table_but_not_in_the_report(tiny_dataset):
    folder = tiny_dataset(train=30)
    for path in (folder / "masks").glob("train_*.png"):
        path.unlink()
    report = check(folder)
    assert len(report.errors()) == 30
    text = table(report)
    assert text.count("error: train") == 20
    assert "… and 10 more (--json lists all)" in text


def test_a_split_without_a_list_is_an_error_and_the_other_is_still_checked(clean):
    (clean / "test.txt").unlink()
    report = check(clean)
    (error,) = report.errors()
    assert str(clean) in error and "test.txt" in error
    assert report.splits["train"].images == 4
    assert list(report.splits) == ["train"]
    assert f"error: {error}" in table(report)


def test_masks_of_zeros_and_ones_are_an_error_as_in_training(clean):
    for path in (clean / "masks").iterdir():
        edit(path, lambda m: m // 255)
    with pytest.raises(RequestError):
        open_split(clean, "train", 1, "ram")
    report = check(clean)
    assert [len(split.empty) for split in report.splits.values()] == [4, 2]
    assert len(report.errors()) == 2
    assert all("255" in line for line in report.errors())


def test_no_data_set_at_all(tmp_path):
    with pytest.raises(RequestError) as caught:
        check(tmp_path)
    assert caught.value.code == "no-data-set"


# --- probably wrong ------------------------------------------------------------------------------


def warnings(report):
    return [line for line in table(report).splitlines() if line.startswith("warning: ")]


def test_a_mask_that_covers_half_of_its_image(clean):
    def upper_half(mask):
        return np.repeat(np.uint8([[255], [0]]), 16, axis=0).repeat(32, axis=1)

    edit(clean / "masks" / "train_2.png", upper_half)
    (warning,) = warnings(check(clean))
    assert "train" in warning and "train_2" in warning and "train_1" not in warning
    assert check(clean).errors() == []


def test_images_and_masks_that_are_swapped(clean):
    for path in list((clean / "images").iterdir()):
        other = clean / "masks" / path.name
        image, mask = path.read_bytes(), other.read_bytes()
        path.write_bytes(mask)
        other.write_bytes(image)
    report = check(clean)
    swapped = [line for line in warnings(report) if "swapped" in line]
    assert ["train: " in line for line in swapped] == [True, False]
    assert "test: " in swapped[1]
    assert json.loads(json.dumps(report.as_dict()))["warnings"] == report.warnings()


def test_a_few_masks_that_are_not_binary_are_not_swapped(clean):
    edit(clean / "masks" / "train_1.png", lambda m: np.where(m > 0, np.uint8(253), np.uint8(7)))
    assert warnings(check(clean)) == []


# --- names and files of any kind -----------------------------------------------------------------


def test_control_characters_of_a_list_do_not_reach_the_terminal(clean):
    (clean / "trainval.txt").write_text("train_0\n\x1b]0;mine\x07\n\x1b]0;mine\x07\n")
    text = table(check(clean))
    assert text.replace("\n", "").isprintable()
    assert text.count(r"\x1b]0;mine\x07") >= 2  # repeated, and missing


def test_a_pipe_and_a_huge_header_are_found_and_the_rest_is_checked(clean, huge_png):
    (clean / "images" / "train_0.png").unlink()
    os.mkfifo(clean / "images" / "train_0.png")
    (clean / "masks" / "train_1.png").write_bytes(huge_png)
    report = check(clean)
    pipe, huge = report.errors()
    assert str(clean / "images" / "train_0.png") in pipe
    assert str(clean / "masks" / "train_1.png") in huge
    assert len(report.splits["train"].targets) == 2


def test_the_real_sirst(sirst):
    report = check(sirst)
    assert report.errors() == []
    counts = {name: (s.images, len(s.areas)) for name, s in report.splits.items()}
    assert counts == {"train": (341, 424), "test": (86, 109)}
    assert report.shared_names == []
