"""Atomic writes, the cache folder, and a check that a folder can be written."""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from .errors import RequestError


def write_part(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a complete, flushed file under a temporary name beside ``path``.

    The name is this process's own (``.NAME.PID.part``), so two processes never share one.

    Args:
        path: the file that it will become; the caller renames it with :func:`os.replace`.
        write: receives the open file, once.

    Returns:
        The temporary file's path.

    Raises:
        OSError: the disk is full or gone.
        BaseException: what ``write`` raises. The temporary file is removed in either case.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return part


def remove_parts(folder: Path, names: Iterable[str]) -> None:
    """Remove the temporary files that killed processes left in :func:`write_part`.

    Args:
        folder: in which no living process writes these files.
        names: of the files; temporary files of others stay.

    Raises:
        OSError: the folder cannot be read or written.
    """
    own = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.\d+\.part")
    for path in folder.iterdir():
        if own.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write under a temporary name, flush to disk, rename: a reader never sees half a file.

    Args:
        path: the file; what was there before is replaced.
        content: bytes, text (written as UTF-8), or a function that writes to the open file.

    Raises:
        OSError: the disk is full or gone; the file that was there before is untouched.
    """
    if isinstance(content, str):
        content = content.encode()
    write = content if callable(content) else lambda file: file.write(content)
    os.replace(write_part(Path(path), write), path)


def cache_folder(name: str) -> Path:
    """Return ``~/.cache/NAME``, or ``NAME`` below ``XDG_CACHE_HOME``; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name


def require_writable(flag: str, folder: Path) -> None:
    """Create the folder if needed, and check that a file can be written there.

    Raises:
        RequestError: it cannot; names the flag and the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise RequestError(
            f"{flag} {folder} cannot be written ({error.strerror}); choose another folder",
            "not-writable",
        ) from error
