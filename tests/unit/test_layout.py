"""Lists and files of a data set, as people really have them."""

import os

import pytest

from mshnet import RequestError
from mshnet.data.layout import DataFolder


def make(folder, images=("a", "b", "c"), masks=None, **lists):
    """Empty files: the layout looks at names only. Lists are bytes by file name without .txt."""
    for part, names in (("images", images), ("masks", images if masks is None else masks)):
        (folder / part).mkdir(parents=True)
        for name in names:
            (folder / part / (name if "." in name else f"{name}.png")).touch()
    for name, content in lists.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


def index(folder, **lists):
    (folder / "img_idx").mkdir()
    for name, content in lists.items():
        (folder / "img_idx" / f"{name}.txt").write_bytes(content)


def refusal(code, call, *arguments):
    """The message of the RequestError, which has this code and is one line."""
    with pytest.raises(RequestError) as caught:
        call(*arguments)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", ["trainval", "train"])
def test_lists_beside_the_images(tmp_path, train):
    data = DataFolder(make(tmp_path, **{train: b"b\na\n", "test": b"c\n"}))
    assert data.names("train") == ["b", "a"]
    assert data.names("test") == ["c"]


def test_lists_in_img_idx(tmp_path):
    make(tmp_path)
    index(tmp_path, train_SET=b"a\nb\n", test_SET=b"c\n")
    data = DataFolder(tmp_path)
    assert data.names("train") == ["a", "b"]
    assert data.names("test") == ["c"]


def test_a_list_beside_the_images_comes_before_img_idx(tmp_path):
    make(tmp_path, trainval=b"a\n")
    index(tmp_path, train_SET=b"b\n")
    assert DataFolder(tmp_path).names("train") == ["a"]


def test_of_several_lists_the_one_named_after_the_folder_is_taken(tmp_path, monkeypatch):
    folder = make(tmp_path / "SIRST3")
    index(folder, train_SIRST3=b"a\n", train_OTHER=b"b\n")
    assert DataFolder(folder).names("train") == ["a"]
    monkeypatch.chdir(folder)
    assert DataFolder(".").names("train") == ["a"]


def test_several_lists_of_other_names_are_refused(tmp_path):
    make(tmp_path)
    index(tmp_path, train_ONE=b"a\n", train_TWO=b"b\n")
    message = refusal("several-lists", DataFolder(tmp_path).names, "train")
    for part in (str(tmp_path / "img_idx"), "train_ONE.txt, train_TWO.txt"):
        assert part in message


@pytest.mark.parametrize(
    "content",
    [
        b"a\nb\n",
        b"a\nb",
        b"a\r\nb\r\n",
        b"\xef\xbb\xbfa\nb\n",
        b"\n a \n\n\tb\n \n",
        b"a.png\nb.PNG\n",
        b"a.bmp\nb.jpg\n",
        b"images/a.png\nimages\\b.png\n",
    ],
    ids=["plain", "no-end", "crlf", "bom", "blanks", "suffix", "other-suffix", "folder"],
)
def test_forms_of_a_list(tmp_path, content):
    assert DataFolder(make(tmp_path, trainval=content)).names("train") == ["a", "b"]


@pytest.mark.parametrize("content", [b"a.b\nx.y.z\n", b"a.b.png\nx.y.z.bmp\n"])
def test_other_dots_belong_to_the_name(tmp_path, content):
    make(tmp_path, images=("a.b.png", "x.y.z.png"), trainval=content)
    samples = DataFolder(tmp_path).samples("train")
    assert [s.name for s in samples] == ["a.b", "x.y.z"]
    assert samples[0].image == tmp_path / "images" / "a.b.png"


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "jpg", "jpeg", "JPG", "Png"])
def test_suffixes(tmp_path, suffix):
    make(tmp_path, images=[f"a.{suffix}"], masks=["a.png"], trainval=b"a\n")
    (sample,) = DataFolder(tmp_path).samples("train")
    assert sample.image == tmp_path / "images" / f"a.{suffix}"
    assert sample.mask == tmp_path / "masks" / "a.png"


def test_the_original_names_of_sirst_masks(tmp_path):
    make(tmp_path, images=["a"], masks=["a_pixels0"], trainval=b"a\n")
    assert DataFolder(tmp_path).locate("a").mask == tmp_path / "masks" / "a_pixels0.png"


def test_png_comes_before_lossy_twins(tmp_path):
    make(tmp_path, images=["a.jpg", "a.png", "a.bmp"], masks=["a.JPG", "a.bmp"], trainval=b"a\n")
    sample = DataFolder(tmp_path).locate("a")
    assert (sample.image.name, sample.mask.name) == ("a.png", "a.bmp")


def test_other_files_are_no_images(tmp_path):
    make(tmp_path, images=["a.txt", "a.npy"], masks=["a"])
    assert DataFolder(tmp_path).locate("a").image is None


# --- what is missing -----------------------------------------------------------------------------


def test_a_missing_folder(tmp_path):
    message = refusal("missing-folder", DataFolder, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "datasets/README.md" in message


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "set.zip").touch()
    message = refusal("not-a-folder", DataFolder, tmp_path / "set.zip")
    assert str(tmp_path / "set.zip") in message
    assert "--stage" in message


@pytest.mark.parametrize("part", ["images", "masks"])
def test_a_missing_part(tmp_path, part):
    make(tmp_path)
    for file in (tmp_path / part).iterdir():
        file.unlink()
    (tmp_path / part).rmdir()
    message = refusal("no-data-set", DataFolder, tmp_path)
    assert str(tmp_path) in message and f"{part}/" in message


@pytest.mark.parametrize("split, file", [("train", "trainval.txt"), ("test", "test.txt")])
def test_a_missing_list(tmp_path, split, file):
    message = refusal("missing-list", DataFolder(make(tmp_path)).names, split)
    for part in (str(tmp_path), file, f"img_idx/{split}_{tmp_path.name}.txt"):
        assert part in message


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_an_empty_list(tmp_path, content):
    message = refusal("empty-list", DataFolder(make(tmp_path, trainval=content)).names, "train")
    assert str(tmp_path / "trainval.txt") in message


def test_a_list_that_is_no_text(tmp_path):
    make(tmp_path, trainval=b"\x89PNG\xff\xfe")
    message = refusal("not-text", DataFolder(tmp_path).names, "train")
    assert str(tmp_path / "trainval.txt") in message


def test_a_list_that_is_a_pipe_is_not_opened(tmp_path):
    make(tmp_path)
    index(tmp_path)
    os.mkfifo(tmp_path / "img_idx" / "train_SET.txt")
    message = refusal("not-a-file", DataFolder(tmp_path).names, "train")
    assert str(tmp_path / "img_idx" / "train_SET.txt") in message


def test_control_characters_of_a_list_do_not_reach_the_terminal(tmp_path):
    make(tmp_path, trainval="\x1b]0;mine\x07\x1b[2J\u202e\n".encode())
    message = refusal("missing-file", DataFolder(tmp_path).samples, "train")
    assert message.isprintable()
    assert r"\x1b]0;mine\x07\x1b[2J\u202e" in message


@pytest.mark.parametrize("images, masks, kind", [("a", "abc", "image"), ("abc", "a", "mask")])
def test_missing_files(tmp_path, images, masks, kind):
    make(tmp_path, list(images), list(masks), trainval=b"a\nb\nc\n")
    message = refusal("missing-file", DataFolder(tmp_path).samples, "train")
    for part in (str(tmp_path / "trainval.txt"), "b (and 1 more)", f"{tmp_path}/{kind}s"):
        assert part in message
