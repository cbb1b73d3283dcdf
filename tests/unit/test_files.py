"""Atomic writes, the cache folder, and folders that cannot be written."""

import os
from pathlib import Path

import pytest

from tpuscope.errors import RequestError
from tpuscope.files import cache_folder, require_writable, write_atomic, write_part


@pytest.mark.parametrize("content", ["two\n", b"two\n", lambda file: file.write(b"two\n")])
def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path, content):
    path = tmp_path / "file.txt"
    path.write_text("one\n")
    write_atomic(path, content)
    assert path.read_text() == "two\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("one\n")

    def half(file):
        file.write(b"tw")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, half)
    assert path.read_text() == "one\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_belongs_to_one_process(tmp_path):
    part = write_part(tmp_path / "file.txt", lambda file: file.write(b"x"))
    assert str(os.getpid()) in part.name
    assert part.parent == tmp_path


def test_the_cache_folder_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("mine") == tmp_path / "mine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("mine") == tmp_path / ".cache" / "mine"


def test_a_folder_that_cannot_be_written_is_a_wrong_request(tmp_path):
    require_writable("--out", tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/out")):
        with pytest.raises(RequestError) as error:
            require_writable("--out", folder)
        assert error.value.code == "not-writable"
        assert f"--out {folder}" in str(error.value)
