"""Staging: complete copies, made once, and nothing written or deleted outside of them."""

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from mshnet import RequestError
from mshnet.data import stage as module
from mshnet.data.layout import DataFolder
from mshnet.data.stage import stage

KINDS = ("folder", "zip", "tar", "tar.gz", "tgz")


@pytest.fixture
def source(tiny_dataset, tmp_path):
    return tiny_dataset(folder=tmp_path / "drive" / "tiny")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "local"


def pack(folder, kind, inside="tiny/", junk=True):
    """The folder itself, or an archive of it beside it, with what a Mac adds."""
    if kind == "folder":
        return folder
    files = [(path, f"{inside}{path.relative_to(folder)}") for path in sorted(folder.rglob("*"))]
    if junk:
        (folder.parent / "junk").write_bytes(b"\0\5\26\7")
        for part in ("images", "masks"):
            files.append((folder.parent / "junk", f"__MACOSX/{inside}{part}/._train_0.png"))
    archive = folder.with_name(f"tiny.{kind}")
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            for path, name in files:
                opened.write(path, name)
    else:
        with tarfile.open(archive, "w" if kind == "tar" else "w:gz") as opened:
            for path, name in files:
                opened.add(path, name, recursive=False)
    return archive


def contents(folder):
    """Bytes of the images, masks and lists; and nothing but the record may lie beside them."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    files.pop(module.RECORD, None)
    return files


def states(folder):
    """A rewritten file has another inode or another time."""
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def noise(length):
    """Bytes that no compression makes shorter."""
    return random.Random(0).randbytes(length)


def unplugged(*_):
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), "/a/drive")


def refusal(code, *arguments):
    """The message of the RequestError, which has this code and is one line."""
    with pytest.raises(RequestError) as caught:
        stage(*arguments)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def nothing_in(root):
    return not root.exists() or not any(root.iterdir())


@contextlib.contextmanager
def files_of_at_most(limit):
    """The kernel refuses longer files, as it refuses any on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the same files ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_has_the_same_names_and_bytes(source, root, kind):
    copy = stage(pack(source, kind), root)
    assert copy == root / "tiny"
    assert contents(copy) == contents(source)
    assert len(DataFolder(copy).samples("train")) == 4
    assert [path.name for path in root.iterdir()] == ["tiny"]
    assert not (copy / module.PART).exists()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize("inside", ["", "./", "other name/"])
def test_images_may_lie_at_the_top_of_an_archive_or_in_one_folder(source, root, kind, inside):
    assert contents(stage(pack(source, kind, inside), root)) == contents(source)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_training_reads_is_brought(source, root, kind):
    wanted = contents(source)
    (source / "img_idx").mkdir()
    for name in ("img_idx/train_tiny.txt", "images/GREY.BMP", "masks/GREY.jpg"):
        (source / name).write_bytes(b"needed")
        wanted[name] = b"needed"
    (source / "images" / "more").mkdir()
    for name in (
        "images/._train_0.png", "images/more/a.png", "masks/a.xml", "a.png", "README.md",
        "scenes.json", "img_idx/a.png", ".hidden.txt",
    ):  # fmt: skip
        (source / name).write_bytes(b"not needed")
    assert contents(stage(pack(source, kind), root)) == wanted


def test_images_that_are_links_are_copied_as_files(source, root):
    (source / "images" / "train_0.png").rename(source.parent / "elsewhere.png")
    (source / "images" / "train_0.png").symlink_to(source.parent / "elsewhere.png")
    copy = stage(source, root)
    assert contents(copy) == contents(source)
    assert not (copy / "images" / "train_0.png").is_symlink()


def test_the_set_named_like_the_archive_is_taken_of_several(source, root):
    for name in ("a", "tiny", "b"):
        shutil.copytree(source, source.parent / "several" / name)
        (source.parent / "several" / name / "test.txt").write_text(name)
    archive = shutil.make_archive(source.parent / "tiny", "zip", source.parent / "several")
    assert (stage(archive, root) / "test.txt").read_text() == "tiny"
    message = refusal("no-data-set", shutil.move(archive, source.parent / "all.zip"), root)
    assert "(a, b, tiny)" in message


@pytest.mark.parametrize("below", [".", "deeper"])
def test_what_lies_below_root_is_returned_as_it_is(source, root, below):
    folder = Path(shutil.move(source, root / below / "tiny"))
    before = states(root)
    assert stage(folder, root) == folder
    assert states(root) == before


def test_an_archive_in_root_is_unpacked_there(source, root):
    root.mkdir()
    archive = shutil.move(pack(source, "zip"), root)
    assert contents(stage(archive, root)) == contents(source)


def test_root_is_the_folder_datasets_unless_named(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert stage("drive/tiny") == Path("datasets/tiny")
    assert contents(tmp_path / "datasets" / "tiny") == contents(source)


@pytest.mark.parametrize("progress, bars", [(True, ["stage tiny: 14"]), (False, [])])
def test_the_bar_counts_files_and_can_be_switched_off(source, root, monkeypatch, progress, bars):
    shown = []

    def bar(items, title, total, **_):
        shown.append(f"{title}: {total}")
        return items

    monkeypatch.setattr(module, "bar", bar)
    stage(source, root, progress=progress)
    assert shown == bars


# --- once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_writes_nothing(source, root, kind):
    packed = pack(source, kind)
    before = states(stage(packed, root))
    assert stage(packed, root) == root / "tiny"
    assert states(root / "tiny") == before


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_second_call_does_not_even_open_the_archive(source, root, kind):
    """An archive with zeros for content, of the same size and time: reading it would fail."""
    packed = pack(source, kind)
    copied = contents(stage(packed, root))
    state = packed.stat()
    packed.write_bytes(bytes(state.st_size))
    os.utime(packed, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert contents(stage(packed, root)) == copied


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_file_is_brought_again_and_no_other(source, root, kind):
    packed = pack(source, kind)
    before = states(stage(packed, root))
    lost, short = root / "tiny" / "images" / "train_0.png", root / "tiny" / "masks" / "test_1.png"
    lost.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    stage(packed, root)
    assert contents(root / "tiny") == contents(source)
    after = states(root / "tiny")
    assert {path for path in before if after[path] != before[path]} == {
        lost, short, root / "tiny" / module.RECORD
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_source_changes_the_copy(source, root, kind):
    before = states(stage(pack(source, kind), root))
    swapped = (source / "test.txt").read_text().replace("test_1", "test_9")  # of the same length
    (source / "test.txt").write_text(swapped)
    (source / "images" / "train_0.png").write_bytes(b"longer than it was" * 99)
    for folder in ("images", "masks"):
        (source / folder / "test_1.png").rename(source / folder / "test_9.png")
    time.sleep(0.01)
    stage(pack(source, kind), root)
    assert contents(root / "tiny") == contents(source)
    if kind in ("folder", "zip"):  # which tell of the single file whether it has changed
        same = root / "tiny" / "images" / "train_1.png"
        assert states(root / "tiny")[same] == before[same]


def test_a_file_of_ones_own_beside_the_copy_stays(source, root):
    (source / "test.txt").rename(source / "other.txt")
    copy = stage(source, root)
    (copy / "test.txt").write_text("test_0\n")
    (source / "other.txt").unlink()
    stage(source, root)
    assert (copy / "test.txt").read_text() == "test_0\n"
    assert not (copy / "other.txt").exists()


def test_another_source_of_the_same_name_replaces_the_copy(source, root, tmp_path, tiny_dataset):
    stage(source, root)
    other = tiny_dataset(folder=tmp_path / "other" / "tiny", train=2)
    for path in (other / "images").iterdir():  # the same sizes and times, other pixels
        ours = (source / "images" / path.name).stat()
        path.write_bytes(bytes(ours.st_size))
        os.utime(path, ns=(ours.st_atime_ns, ours.st_mtime_ns))
    assert contents(stage(other, root)) == contents(other)
    assert contents(stage(pack(source, "zip"), root)) == contents(source)


def test_an_archive_that_was_only_touched_writes_no_image_again(source, root):
    packed = pack(source, "zip")
    before = states(stage(packed, root) / "images")
    os.utime(packed, ns=(0, 0))
    stage(packed, root)
    assert states(root / "tiny" / "images") == before
    assert json.loads((root / "tiny" / module.RECORD).read_text())["version"][1] == 0


def test_a_record_that_a_power_cut_emptied(source, root):
    (stage(source, root) / module.RECORD).write_bytes(b"")
    (root / "tiny" / "images" / "train_0.png").write_bytes(
        bytes((source / "images" / "train_0.png").stat().st_size)
    )
    assert contents(stage(source, root)) == contents(source)


# --- interrupted ---------------------------------------------------------------------------------

SLOWLY = """
import sys, time
from mshnet.data import stage as module

write = module.os.replace

def slowly(*paths):
    time.sleep(0.02)
    write(*paths)

module.os.replace = slowly
module.stage(*sys.argv[1:])
"""


@pytest.mark.parametrize("kind", ["folder", "zip", "tar.gz"])
def test_a_killed_copy_goes_on_where_it_stopped(tiny_dataset, tmp_path, root, kind):
    source = tiny_dataset(train=150, test=50, size=16, folder=tmp_path / "drive" / "tiny")
    packed = pack(source, kind)
    copy = root / "tiny"
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, str(packed), str(root)])
    deadline = time.monotonic() + 120
    while len(list(copy.glob("*/*.png"))) < 40 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = {path: state for path, state in states(copy).items() if path.suffix == ".png"}
    assert 40 <= len(there) < 400, "killed in the middle"
    for path in there:
        assert path.read_bytes() == (source / path.relative_to(copy)).read_bytes()

    stage(packed, root)
    assert contents(copy) == contents(source)
    after = states(copy)
    assert all(after[path] == state for path, state in there.items())


def test_a_copy_killed_before_its_record_is_ours(source, root):
    (root / "tiny" / module.PART).mkdir(parents=True)
    (root / "tiny" / module.PART / module.RECORD).write_text("{")
    assert contents(stage(source, root)) == contents(source)


def test_a_source_that_vanishes_in_the_middle(source, root, monkeypatch):
    replace, moved = os.replace, []

    def unplug(*paths):
        moved.append(paths)
        if len(moved) == 5:
            shutil.move(source, source.parent / "away")
        replace(*paths)

    monkeypatch.setattr(module.os, "replace", unplug)
    monkeypatch.setattr(module, "THREADS", 1)
    message = refusal("staging-stopped", source, root)
    assert str(source) in message and str(root) in message
    before = {path: s for path, s in states(root / "tiny").items() if path.parent.name == "images"}
    assert before
    shutil.move(source.parent / "away", source)
    assert contents(stage(source, root)) == contents(source)
    after = states(root / "tiny")
    assert all(after[path] == state for path, state in before.items())


def test_a_stale_file_is_no_part_of_an_interrupted_copy(source, root, monkeypatch):
    """The record is new, the file is not brought yet: its old form must not pass for it."""
    copy, name = stage(source, root), "images/train_0.png"
    (copy / module.RECORD).write_bytes(b"")
    (copy / name).write_bytes(bytes(len((source / name).read_bytes())))
    monkeypatch.setattr(module, "_write", unplugged)
    assert "/a/drive" in refusal("staging-stopped", source, root)
    monkeypatch.undo()
    assert contents(stage(source, root)) == contents(source)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_a_disk_that_fills_up_in_the_middle(source, root, kind):
    (source / "images" / "huge.png").write_bytes(noise(50_000))
    packed = pack(source, kind)
    with files_of_at_most(20_000):
        message = refusal("disk-full", packed, root)
    assert str(packed) in message and str(root) in message
    assert not (root / "tiny" / module.PART).exists()
    assert contents(stage(packed, root)) == contents(source)


def test_a_disk_that_is_really_full(source, root):
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        for i in range(40):  # few bytes each, and a page of the disk each
            (source / "images" / f"small_{i}.png").write_bytes(b"small")
        assert "No space left on device" in refusal("disk-full", source, root)
        there = len(contents(root / "tiny"))
        assert 0 < there < len(contents(source))
        subprocess.run(["mount", "-o", "remount,size=2m", str(root)], check=True)
        assert contents(stage(source, root)) == contents(source)
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_space_is_said_before(source, root, kind, monkeypatch):
    need = sum(map(len, contents(source).values()))
    packed = pack(source, kind)
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=need - 1))
    message = refusal("disk-full", packed, root)
    assert f"{need / 1e6:.1f} MB" in message and str(root) in message
    assert nothing_in(root)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=need))
    stage(packed, root)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=0))
    stage(packed, root)


def test_a_file_that_shrinks_while_it_is_copied(source, root, monkeypatch):
    shrunk, original = source / "images" / "train_0.png", module._require_space
    whole = shrunk.read_bytes()

    def shrink(*arguments):  # after the listing, before the copy
        shrunk.write_bytes(whole[:-7])
        original(*arguments)

    monkeypatch.setattr(module, "_require_space", shrink)
    message = refusal("staging-stopped", source, root)
    assert f"images/train_0.png gave {len(whole) - 7} bytes of {len(whole)}" in message
    assert not (root / "tiny" / "images" / "train_0.png").exists()
    monkeypatch.setattr(module, "_require_space", original)
    assert contents(stage(source, root)) == contents(source)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("keep", [0.999, 0.6, 0.03, 0])
def test_a_truncated_archive(source, root, kind, keep):
    packed = pack(source, kind)
    whole = packed.read_bytes()
    end = len(whole.rstrip(b"\0")) if kind == "tar" else len(whole)  # zeros say nothing
    packed.write_bytes(whole[: int(keep * end)])
    assert str(packed) in refusal("damaged-archive", packed, root)
    assert nothing_in(root)
    packed.write_bytes(whole)
    assert contents(stage(packed, root)) == contents(source)


def test_a_tar_that_is_cut_between_two_files(source, root):
    packed = pack(source, "tar")
    with tarfile.open(packed) as opened:
        cut = opened.getmembers()[7].offset
    packed.write_bytes(packed.read_bytes()[:cut])
    assert str(packed) in refusal("damaged-archive", packed, root)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_foreign_file(source, root, kind):
    packed = source.parent / f"tiny.{kind}"
    packed.write_text("<html>Google Drive: too many users have viewed this file</html>" * 99)
    refusal("damaged-archive", packed, root)
    assert nothing_in(root)


@pytest.mark.parametrize("damage", [1, 999])
def test_an_image_that_was_damaged_in_its_zip(source, root, damage):
    (source / "images" / "noise.png").write_bytes(noise(2500).hex().encode())
    packed = pack(source, "zip")
    content = bytearray(packed.read_bytes())
    at = content.index(b"images/noise.png") + 1000
    content[at : at + damage] = bytes(~b & 255 for b in content[at : at + damage])
    packed.write_bytes(content)
    refusal("damaged-archive", packed, root)
    assert nothing_in(root)


@pytest.mark.parametrize("damage", [1, 999])
def test_a_gzip_that_was_damaged(source, root, damage):
    (source / "images" / "noise.png").write_bytes(noise(5000).hex().encode())
    packed = pack(source, "tar.gz")
    content = bytearray(packed.read_bytes())
    content[1500 : 1500 + damage] = bytes(~b & 255 for b in content[1500 : 1500 + damage])
    packed.write_bytes(content)
    refusal("damaged-archive", packed, root)
    assert nothing_in(root)


@pytest.mark.parametrize("damage", ["cut short", "one image"])
def test_a_damaged_archive_does_not_take_the_copy_with_it(source, root, damage):
    packed = pack(source, "zip")
    before = states(stage(packed, root) / "images")
    (source / "images" / "noise.png").write_bytes(noise(5000))
    content = bytearray(pack(source, "zip").read_bytes())
    content[content.index(b"images/noise.png") + 1000] ^= 1
    packed.write_bytes(content[:-99] if damage == "cut short" else content)
    refusal("damaged-archive", packed, root)
    assert states(root / "tiny" / "images") == before


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["../evil.txt", "/{0}/evil.txt", "tiny/../../evil.txt"])
def test_an_archive_with_a_path_outside(source, root, tmp_path, kind, name):
    name = name.format(str(tmp_path).strip("/"))
    packed = pack(source, kind)
    (source / "evil.txt").write_text("evil")
    if kind == "zip":
        with zipfile.ZipFile(packed, "a") as opened:
            opened.writestr(name, "evil")
    else:
        with tarfile.open(packed, "a") as opened:
            evil = opened.gettarinfo(source / "evil.txt")
            evil.name = name
            opened.addfile(evil, (source / "evil.txt").open("rb"))
    (source / "evil.txt").unlink()
    assert f"{name!r}, a path outside" in refusal("unsafe-archive", packed, root)
    assert nothing_in(root)
    assert list(tmp_path.rglob("evil.txt")) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
@pytest.mark.parametrize("name", ["tiny/images/evil.png", "tiny/evil"])
def test_a_tar_with_a_link(source, root, kind, name):
    packed = pack(source, "tar")
    link = tarfile.TarInfo(name)
    link.type, link.linkname = kind, "/etc/passwd"
    with tarfile.open(packed, "a") as opened:
        opened.addfile(link)
    assert f"{name!r}, a link" in refusal("unsafe-archive", packed, root)
    assert nothing_in(root)


def test_an_encrypted_zip(source, root):
    packed = pack(source, "zip")
    content = bytearray(packed.read_bytes())
    at = -1
    while (at := content.find(b"PK\1\2", at + 1)) >= 0:
        content[at + 8] |= 1  # the flag in the table of files
    packed.write_bytes(content)
    assert "encrypted" in refusal("damaged-archive", packed, root)
    assert nothing_in(root)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", ["images", "masks"])
def test_what_is_no_data_set(source, root, kind, missing):
    shutil.rmtree(source / missing)
    packed = pack(source, kind, junk=False)
    assert str(packed) in refusal("no-data-set", packed, root)
    assert nothing_in(root)


def test_a_folder_without_any_image(source, root):
    for path in (source / "images").iterdir():
        path.rename(path.with_suffix(".tif"))
    assert str(source / "images") in refusal("no-data-set", source, root)


def test_a_source_emptied_by_a_drive_that_dropped_out_does_not_empty_the_copy(source, root):
    before = states(stage(source, root))
    for path in (source / "images").iterdir():
        path.unlink()
    refusal("no-data-set", source, root)
    assert states(root / "tiny") == before


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_target_that_is_not_ours(source, root, kind):
    (root / "tiny").mkdir(parents=True)
    packed = pack(source, kind)
    stage(packed, root)  # an empty folder is anybody's
    shutil.rmtree(root / "tiny")
    (root / "tiny" / "images").mkdir(parents=True)
    (root / "tiny" / "images" / "train_0.png").write_text("mine")
    assert str(root / "tiny") in refusal("foreign-folder", packed, root)
    assert contents(root / "tiny") == {"images/train_0.png": b"mine"}
    shutil.rmtree(root / "tiny")
    (root / "tiny").write_text("mine")
    refusal("foreign-folder", packed, root)


def test_a_missing_source(tmp_path, root):
    message = refusal("no-source", tmp_path / "nowhere", root)
    assert f"{tmp_path / 'nowhere'} does not exist" in message
    assert "Drive" not in message
    assert not root.exists()


def test_a_source_on_a_drive_that_is_not_mounted(tmp_path, root, monkeypatch):
    monkeypatch.setattr(module, "DRIVE", tmp_path / "drive")
    source = tmp_path / "drive" / "MyDrive" / "tiny"
    assert "drive.mount(" in refusal("no-source", source, root)
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    assert "drive.mount(" not in refusal("no-source", source, root)


def test_a_file_that_is_no_archive(source, root):
    message = refusal("no-source", source / "trainval.txt", root)
    assert str(source / "trainval.txt") in message and ".tar.gz" in message


def test_a_root_that_cannot_be_written(source, tmp_path):
    (tmp_path / "local").write_text("a file where the folder should be")
    assert str(tmp_path / "local") in refusal("staging-stopped", source, tmp_path / "local")


def test_an_error_of_the_drive_itself(source, root, monkeypatch):
    monkeypatch.setattr(module, "DataFolder", unplugged)
    assert "Transport endpoint is not connected" in refusal("staging-stopped", source, root)


# --- names and records that are not to be trusted ------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["", ".", ".."])
@pytest.mark.parametrize("damaged", [False, True])
def test_an_archive_named_like_a_folder_above(source, root, tmp_path, kind, name, damaged):
    """`...zip` was unpacked into the parent of root and, where damaged, deleted it."""
    root.mkdir()
    (tmp_path / "thesis.txt").write_text("mine")
    (root / "other.txt").write_text("mine")
    packed = pack(source, kind).rename(source.parent / f"{name}.{kind}")
    if damaged:
        packed.write_bytes(packed.read_bytes()[:-200])
    before = states(tmp_path)
    assert str(packed) in refusal("bad-name", packed, root)
    assert states(tmp_path) == before


def test_a_folder_named_by_two_dots(source, root):
    assert str(source / "images" / "..") in refusal("bad-name", source / "images" / "..", root)
    assert not root.exists()


LISTED = {
    "outside": {"../../victim.txt": [1, 2]},
    "absolute": {"/{0}/victim.txt": [1, 2]},
    "in and out": {"images/../../../victim.txt": [1, 2]},
    "not needed": {"thesis.tex": [1, 2]},
    "NUL": {"images/a\0.png": [1, 2]},
    "no file's name": {"images/\ud800.png": [1, 2]},
    "number": {"test.txt": 3},
    "too short": {"test.txt": [1]},
    "text": {"test.txt": ["1", 2]},
    "list of files": ["test.txt"],
    "null for files": None,
}
RECORDS = {name: {"source": "x", "version": None, "files": f} for name, f in LISTED.items()}
RECORDS |= {
    "no files": {"source": "x"},
    "list": [1, 2],
    "string": "abc",
    "other": 3.5,
    "null": None,
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_of_somebody_else_deletes_nothing(source, root, tmp_path, record):
    (root / "tiny").mkdir(parents=True)
    text = json.dumps(record).replace("{0}", str(tmp_path).strip("/"))
    (root / "tiny" / module.RECORD).write_text(text)
    for victim in (tmp_path / "victim.txt", root / "victim.txt", root / "tiny" / "thesis.tex"):
        victim.write_text("mine")
    before = states(tmp_path)
    assert str(root / "tiny") in refusal("foreign-folder", source, root)
    assert states(tmp_path) == before


def test_a_folder_that_links_elsewhere_deletes_nothing_there(source, root, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_text("mine")
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "images").symlink_to(tmp_path / "pictures")
    record = {"source": "x", "version": None, "files": {"images/a.png": [4, 2]}}
    (root / "tiny" / module.RECORD).write_text(json.dumps(record))
    refusal("foreign-folder", source, root)
    assert (tmp_path / "pictures" / "a.png").read_text() == "mine"


def test_a_record_nested_too_deep_to_read(source, root):
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / module.RECORD).write_text("[" * 100_000)
    assert contents(stage(source, root)) == contents(source)


# --- archives that Python's readers fail on in their own ways ------------------------------------


def rezip(path, compression):
    """The same zip in another compression, and where the data of a noisy image begins in it."""
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist() if not name.endswith("/")}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in files.items():
            new.writestr(name, content)
    return path.read_bytes().index(b"images/noise.png") + 500


@pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_damaged_zip_of_another_compression(source, root, compression):
    (source / "images" / "noise.png").write_bytes(noise(2500).hex().encode())
    packed = pack(source, "zip")
    at = rezip(packed, compression)
    assert contents(stage(packed, root)) == contents(source)
    shutil.rmtree(root)
    content = bytearray(packed.read_bytes())
    content[at : at + 50] = bytes(~b & 255 for b in content[at : at + 50])
    packed.write_bytes(content)
    refusal("damaged-archive", packed, root)
    assert nothing_in(root)


def test_a_zip_with_a_name_that_is_no_utf_8(source, root):
    shutil.copy(source / "images" / "train_0.png", source / "images" / "ä.png")
    packed = pack(source, "zip")
    packed.write_bytes(packed.read_bytes().replace("ä".encode(), b"\xff\xfe"))
    refusal("damaged-archive", packed, root)


def test_a_tar_with_a_nul_in_a_name(source, root):
    packed = pack(source, "tar")
    evil = tarfile.TarInfo("x")
    evil.pax_headers = {"path": "tiny/images/a\0b.png"}
    with tarfile.open(packed, "a", format=tarfile.PAX_FORMAT) as opened:
        opened.addfile(evil)
    refusal("damaged-archive", packed, root)


# --- two at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_two_processes_that_stage_at_once(tiny_dataset, tmp_path, root, kind):
    source = tiny_dataset(train=50, test=10, size=16, folder=tmp_path / "drive" / "tiny")
    packed = pack(source, kind)
    command = [sys.executable, "-c", SLOWLY, str(packed), str(root)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert contents(root / "tiny") == contents(source)


# --- real data -----------------------------------------------------------------------------------


def test_the_real_set_is_copied_whole(sirst, tmp_path):
    copy = stage(sirst, tmp_path)
    for split, count in (("train", 341), ("test", 86)):
        ours, theirs = (DataFolder(folder).samples(split) for folder in (copy, sirst))
        assert len(ours) == count
        for a, b in zip(ours, theirs, strict=True):
            assert (a.image.read_bytes(), a.mask.read_bytes()) == (
                b.image.read_bytes(), b.mask.read_bytes()
            )  # fmt: skip
