"""The three caches: the same samples, read once, and refused before the work starts."""

import os
import pickle
import resource
import shutil
from functools import partial

import numpy as np
import pytest
from PIL import Image

from mshnet import RequestError
from mshnet.data import sample_cache as module
from mshnet.data import source
from mshnet.data.layout import DataFolder, Sample
from mshnet.data.sample_cache import CACHES, SampleCache


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def samples(tiny_dataset):
    """Four samples: one larger, one without a target, one whose mask is not binary."""
    folder = tiny_dataset(train=4)
    masks, images = folder / "masks", folder / "images"
    Image.fromarray(np.full((40, 24, 3), (9, 99, 200), np.uint8)).save(images / "train_1.png")
    Image.fromarray(np.eye(40, 24, dtype=np.uint8) * 255).save(masks / "train_1.png")
    Image.fromarray(np.zeros((32, 32), np.uint8)).save(masks / "train_2.png")
    Image.fromarray(np.eye(32, dtype=np.uint8) * 253).save(masks / "train_3.png")
    return DataFolder(folder).samples("train")


def refusal(code, *arguments, **options):
    """The message of the RequestError, which has this code and is one line."""
    with pytest.raises(RequestError) as caught:
        SampleCache(*arguments, **options)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def no_decoding(monkeypatch):
    def read_sample(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(module, "read_sample", read_sample)


# --- the same samples ----------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_all_caches_give_the_same_samples(samples, channels):
    ram, disk, none = (SampleCache(samples, channels, cache) for cache in CACHES)
    again = SampleCache(samples, channels, "disk")
    assert len(ram) == 4
    for i in range(4):
        for other in (disk, none, again):
            for ours, theirs in zip(ram[i], other[i], strict=True):
                np.testing.assert_array_equal(ours, theirs)
                assert ours.dtype == theirs.dtype == np.uint8
    assert ram[1][0].shape == ((40, 24) if channels == 1 else (40, 24, 3))


@pytest.mark.parametrize("cache", [*CACHES, "disk again"])
def test_what_was_unusual_is_noted(samples, cache):
    if cache == "disk again":
        SampleCache(samples, 1, "disk")
    store = SampleCache(samples, 1, cache.split()[0])
    assert store.touched == ["train_3"]
    assert store.empty == ["train_2"]
    assert source.describe(store, "train") == (
        "train: 4 images, 1 masks were not binary and were cut at half of the maximum, "
        "1 without a target"
    )


# --- when files are read -------------------------------------------------------------------------


def test_ram_and_disk_decode_only_once(samples, monkeypatch):
    stores = [SampleCache(samples, 1, cache) for cache in ("ram", "disk")]
    no_decoding(monkeypatch)
    stores.append(SampleCache(samples, 1, "disk"))
    for store in stores:
        assert [store[i][0].ndim for i in range(4)] == [2] * 4
    with pytest.raises(AssertionError, match="decoded again"):
        SampleCache(samples, 1, "ram")


def test_another_choice_of_channels_is_another_cache(samples):
    assert SampleCache(samples, 1, "disk")[0][0].shape == (32, 32)
    assert SampleCache(samples, 3, "disk")[0][0].shape == (32, 32, 3)


@pytest.mark.parametrize("part", ["image", "mask"])
def test_a_changed_file_is_read_anew(samples, part):
    SampleCache(samples, 1, "disk")
    path = getattr(samples[0], part)
    Image.fromarray(np.full((32, 32), 255, np.uint8)).save(path)
    image, mask = SampleCache(samples, 1, "disk")[0]
    assert (image if part == "image" else mask * 255).min() == 255


def test_a_touched_file_of_the_same_size_is_read_anew(samples, monkeypatch):
    SampleCache(samples, 1, "disk")
    state = samples[0].image.stat()
    os.utime(samples[0].image, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    no_decoding(monkeypatch)
    with pytest.raises(AssertionError, match="decoded again"):
        SampleCache(samples, 1, "disk")


def test_an_interrupted_pass_leaves_no_cache_behind(samples, cache_home, monkeypatch):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(samples[3].mask)
    refusal("size-mismatch", samples, 1, "disk")
    assert [p for p in cache_home.rglob("*") if p.is_file()] == []


def test_the_cache_lies_below_home_unless_told_otherwise(samples, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # empty counts as unset
    SampleCache(samples, 1, "disk")
    kinds = sorted(p.suffix for p in (tmp_path / "home" / ".cache" / "mshnet").iterdir())
    assert kinds == [".json", ".pixels"]


@pytest.mark.parametrize("suffix", [".json", ".pixels"])
def test_a_cache_that_a_power_cut_emptied_is_written_anew(samples, cache_home, suffix):
    whole = SampleCache(samples, 1, "disk")[0][0].copy()
    (file,) = cache_home.rglob(f"*{suffix}")
    file.write_bytes(b"")
    np.testing.assert_array_equal(SampleCache(samples, 1, "disk")[0][0], whole)


def test_a_disk_store_travels_to_workers_without_its_pixels(samples):
    store = SampleCache(samples, 1, "disk")
    before = store[0]
    packed = pickle.dumps(store)
    assert len(packed) < 3000  # the four images alone are 8 KB
    for ours, theirs in zip(before, pickle.loads(packed)[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- refused before the work starts --------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
def test_a_damaged_file_is_found_at_once(samples, cache):
    content = samples[2].image.read_bytes()
    samples[2].image.write_bytes(content[: len(content) // 2])
    assert str(samples[2].image) in refusal("damaged-file", samples, 1, cache)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("part", ["image", "mask"])
def test_a_header_of_20000_pixels_a_side(samples, huge_png, cache, part):
    path = getattr(samples[2], part)
    path.write_bytes(huge_png)
    assert str(path) in refusal("damaged-file", samples, 1, cache)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("part", ["image", "mask"])
def test_a_pipe_in_place_of_a_file(samples, cache, part):
    path = getattr(samples[2], part)
    path.unlink()
    os.mkfifo(path)
    assert str(path) in refusal("not-a-file", samples, 1, cache)


@pytest.mark.parametrize("cache", CACHES)
def test_a_mask_of_another_size(samples, cache):
    Image.fromarray(np.zeros((16, 20), np.uint8)).save(samples[2].mask)
    message = refusal("size-mismatch", samples, 1, cache)
    for part in (f"{samples[2].image} is 32×32", f"{samples[2].mask} is 20×16"):
        assert part in message


@pytest.mark.parametrize("cache", CACHES)
def test_a_file_that_vanished(samples, cache):
    samples[2].image.unlink()
    assert str(samples[2].image) in refusal("missing-file", samples, 1, cache)


def test_more_than_half_of_the_memory(samples, monkeypatch):
    need = 3 * 32 * 32 * 2 + 40 * 24 * 2
    monkeypatch.setattr(module, "host_memory", lambda: (10**12, 2 * need))
    SampleCache(samples, 1, "ram")
    monkeypatch.setattr(module, "host_memory", lambda: (10**12, 2 * need - 1))
    assert "--cache disk" in refusal("too-little-memory", samples, 1, "ram")
    SampleCache(samples, 1, "disk")


def test_the_memory_of_a_container_counts(samples, tmp_path, monkeypatch):
    """A machine with 64 GB free, and a container on it that may use 8 KB more."""
    files = {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 64000000 kB\n",
        "sys/fs/cgroup/memory.max": "1008192\n",
        "sys/fs/cgroup/memory.current": "1000000\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "host_memory", partial(module.host_memory, tmp_path))
    refusal("too-little-memory", samples, 1, "ram")


def test_memory_of_unknown_size_is_taken_as_enough(samples, monkeypatch):
    monkeypatch.setattr(module, "host_memory", lambda: None)
    assert len(SampleCache(samples, 1, "ram")) == 4


def test_a_full_disk(samples, cache_home):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the cache needs twice that
    try:
        message = refusal("unwritable-cache", samples, 1, "disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for part in (str(cache_home), "XDG_CACHE_HOME", "--cache none"):
        assert part in message
    assert [p for p in cache_home.rglob("*") if p.is_file()] == []
    assert len(SampleCache(samples, 1, "disk")) == 4


def test_a_cache_folder_that_cannot_be(samples, cache_home):
    cache_home.write_text("a file where the folder should be")
    assert str(cache_home) in refusal("unwritable-cache", samples, 1, "disk")


# --- from a folder -------------------------------------------------------------------------------


def test_a_split_is_opened_by_name(tiny_dataset):
    folder = tiny_dataset(train=3, test=2)
    assert len(source.open_split(folder, "train", 1, "ram")) == 3
    assert len(source.open_split(folder, "test", 3, "none")) == 2


def test_a_split_without_any_target_is_refused(tiny_dataset):
    folder = tiny_dataset()
    for path in (folder / "masks").iterdir():
        with Image.open(path) as mask:
            zeros_and_ones = np.asarray(mask) // 255
        Image.fromarray(zeros_and_ones).save(path)
    with pytest.raises(RequestError) as caught:
        source.open_split(folder, "train", 1, "ram")
    assert caught.value.code == "no-target"
    assert str(folder) in str(caught.value)


def test_the_built_in_scenes_are_written_below_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "TRAIN_SCENES", 2)
    monkeypatch.setattr(source, "TEST_SCENES", 1)
    folder = source.built_in_scenes(32)
    assert folder.resolve().parent == tmp_path / "datasets"
    assert len(source.open_split(folder, "train", 1, "ram")) == 2


def test_built_in_scenes_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").write_text("a file where the folder should be")
    with pytest.raises(RequestError) as caught:
        source.built_in_scenes(32)
    assert caught.value.code == "unwritable-scenes"
    assert str(tmp_path / "datasets") in str(caught.value)


def test_samples_keep_the_order_of_the_list(samples):
    backwards = SampleCache(samples[::-1], 1, "disk")
    forwards = SampleCache(samples, 1, "disk")
    for i in range(4):
        np.testing.assert_array_equal(backwards[3 - i][0], forwards[i][0])


def test_the_same_files_elsewhere_are_another_cache(samples, tmp_path, cache_home):
    SampleCache(samples, 1, "disk")
    shutil.copytree(samples[0].image.parents[1], tmp_path / "copy")
    moved = [
        Sample(s.name, *(tmp_path / "copy" / p.parent.name / p.name for p in (s.image, s.mask)))
        for s in samples
    ]
    SampleCache(moved, 1, "disk")
    assert len(list(cache_home.rglob("*.pixels"))) == 2
