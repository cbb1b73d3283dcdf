"""Copy a data set from slow storage to the local disk, once.

A mounted Google Drive or bucket answers each opened file over the network, and training opens
thousands. :func:`stage` copies a folder or unpacks an archive, and leaves ``.staged.json`` beside
the files: what the copy was made from. The next call compares that and copies only what differs.

Each file is written in ``.part`` and renamed when it is complete; stale files are deleted before a
new record is written. So a file that the record lists and the disk has is complete and current,
whenever a call was interrupted, and the next call continues from there. A lock makes a second
process wait.
"""

import contextlib
import errno
import fcntl
import gzip
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from tpuscope.drives import DRIVE, MOUNT_DRIVE
from tpuscope.errors import RequestError
from tpuscope.progress import progress as bar

from .layout import SUFFIXES, DataFolder

_PARTS = ("images", "masks", "img_idx")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
RECORD, PART = ".staged.json", ".part"
THREADS = 16  # a request to a drive is mostly waiting
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of each file, by its path below the data set: size and version, and a function that opens it.
_Files = dict[str, tuple[list, Callable[[], Any]]]


def stage(source: str | Path, root: str | Path = "datasets", *, progress: bool = True) -> Path:
    """Return a local folder with what training reads: ``images/``, ``masks/`` and the lists.

    Args:
        source: a data set's folder, or a .zip, .tar, .tar.gz or .tgz that holds one.
        root: folder on the local disk; the copy is ``root/NAME``. A data set below it is returned
            as it is.
        progress: show a bar to people; a log gets none in any case.

    Raises:
        RequestError: the source holds no complete data set, ``root/NAME`` was not made by staging,
            or a disk is full or gone. Complete files stay, and the next call continues.
    """
    source, root = Path(source).absolute(), Path(root)
    try:
        if source.is_dir() and source.resolve().is_relative_to(root.resolve()):
            return DataFolder(source).folder
        target = root / _name(source)
        with _locked(root, progress):
            return _bring(source, target, progress)
    except OSError as error:
        full = error.errno in _FULL
        fix = "free some space" if full else "check that both can be reached (drives drop out)"
        raise RequestError(
            f"staging {source} to {root} stopped ({error.strerror if full else error}); {fix}, "
            "then run the same command again",
            "disk-full" if full else "staging-stopped",
        ) from error


@contextlib.contextmanager
def _locked(root: Path, progress: bool) -> Iterator[None]:
    """Wait while another process stages to the same root.

    The lock is on the folder above, so that a refused source leaves no empty root behind.
    """
    folder = root.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system has no locks, or the folder is private
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)  # releases the lock, as the end of the process does
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    print(f"waiting for another process that stages to {root}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _name(source: Path) -> str:
    """Return the name of the local folder for a source that exists.

    Raises:
        RequestError: the source is missing, neither folder nor archive, or its name is no folder's.
    """
    suffix = next((s for s in ARCHIVES if source.name.lower().endswith(s)), None)
    if source.is_dir() or (source.is_file() and suffix):
        name = source.name if source.is_dir() else source.name[: -len(suffix or "")]
        if name in ("", ".", ".."):
            raise RequestError(
                f"{source} would be staged to a folder named {name!r}; rename it, or name it by "
                "its own name",
                "bad-name",
            )
        return name
    if source.exists():
        fault = f"is neither a folder nor an archive; expected {', '.join(ARCHIVES)}"
    elif source.is_relative_to(DRIVE) and not DRIVE.is_mount():
        fault = f"is not there, because Drive is not mounted; first run {MOUNT_DRIVE}"
    else:
        fault = "does not exist; name the folder of a data set, or an archive of it"
    raise RequestError(f"{source} {fault}", "no-source")


def _bring(source: Path, target: Path, progress: bool) -> Path:
    """Make the target hold what the source holds, and no file of an earlier source."""
    state = source.stat()
    version = [state.st_size, state.st_mtime_ns] if source.is_file() else None
    record = _record(target)
    same, before = record.get("source") == str(source), record.get("files", {})
    unchanged = same and record.get("version") == version
    if version and unchanged and all(_has(target / n, size) for n, (size, _) in before.items()):
        return target  # without opening the archive
    with _archive(source, version) if version else _folder(source) as found:
        files = {name: state for name, (state, _) in found.items()}
        kept = {name for name in before if same and before[name] == files.get(name)}
        missing = [n for n in files if n not in kept or not _has(target / n, files[n][0])]
        if unchanged and before == files and not missing:
            return target
        _require_space(target.parent, sum(files[name][0] for name in missing))
        part = target / PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            for name in (before.keys() | files.keys()) - kept:
                (target / name).unlink(missing_ok=True)
            new = {"source": str(source), "version": version, "files": files}
            (part / RECORD).write_text(json.dumps(new, indent=1), encoding="utf-8")
            os.replace(part / RECORD, target / RECORD)
            # An archive is one file, read by one thread from its beginning to its end.
            threads = 1 if version else THREADS
            title = f"stage {source.name}" if progress else None
            _write({name: found[name] for name in missing}, target, threads, title)
        except Exception as error:
            if version and not same and _is_damage(error):  # keep nothing of a damaged archive
                shutil.rmtree(target, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _is_damage(error: Exception) -> bool:
    """Return whether an exception of an archive's reader is the archive's fault, not a disk's.

    On damaged bytes Python's readers raise nearly every type; of OSErrors only those without a
    number, and EINVAL, where they seek to a place before the file.
    """
    if isinstance(error, OSError):
        return error.errno in (None, errno.EINVAL)
    return not isinstance(error, RequestError)


def _write(found: _Files, target: Path, threads: int, title: str | None) -> None:
    """Write each file in the target's ``.part`` and rename it when it is complete."""
    for folder in {(target / name).parent for name in found}:
        folder.mkdir(exist_ok=True)

    def write(number: int, name: str) -> None:
        part = target / PART / str(number)
        (size, _), read = found[name]
        with read() as content, part.open("wb") as file:
            shutil.copyfileobj(content, file, 2**20)
            if file.tell() != size:
                raise OSError(f"{name} gave {file.tell()} bytes of {size}")
        os.replace(part, target / name)

    pool = ThreadPoolExecutor(threads)
    try:
        done = (pool.map if threads > 1 else map)(write, range(len(found)), found)
        for _ in bar(done, title, len(found), unit="file") if title else done:
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C waits for few files


@contextlib.contextmanager
def _folder(source: Path) -> Iterator[_Files]:
    """Yield size and time, and a reader, of each file that training reads of a folder."""
    DataFolder(source)  # refuses what is no data set
    found: _Files = {}
    for part in ("", *_PARTS):
        if not (source / part).is_dir():
            continue
        with os.scandir(source / part) as entries:
            for entry in entries:
                name = f"{part}/{entry.name}".removeprefix("/")
                if _needed(name) and entry.is_file():
                    state = entry.stat()
                    found[name] = [state.st_size, state.st_mtime_ns], partial(open, entry, "rb")
    for part in ("images", "masks"):  # also when the drive drops out in the middle
        if not any(name.startswith(f"{part}/") for name in found):
            raise RequestError(
                f"{source / part} holds no image; expected {', '.join(SUFFIXES)}", "no-data-set"
            )
    yield found


def _needed(name: str) -> bool:
    """Return whether a path below a data set's folder is an image, a mask or a list."""
    path = PurePosixPath(name)
    if path.name.startswith("."):  # a file manager's own, such as ._NAME.png
        return False
    if str(path.parent) in ("images", "masks"):
        return path.suffix.lower() in SUFFIXES
    return str(path.parent) in (".", "img_idx") and path.suffix == ".txt"


@contextlib.contextmanager
def _archive(source: Path, version: list[int]) -> Iterator[_Files]:
    """Yield size and checksum, and a reader, of each file that training reads of an archive.

    A tar has no checksums: with another version of the archive all its files count as changed.
    Files are read and written here, never extracted by their own paths, so only plain files below
    the target can result. An archive with links or paths outside is refused all the same.
    """
    try:
        with contextlib.ExitStack() as stack:
            if source.suffix.lower() == ".zip":
                opened = stack.enter_context(zipfile.ZipFile(source))
                entries = [
                    (i.filename, [i.file_size, i.CRC], partial(opened.open, i), True)
                    for i in opened.infolist()
                    if not i.is_dir()
                ]
            else:
                unzip = open if source.suffix.lower() == ".tar" else gzip.open
                stream = stack.enter_context(unzip(source, "rb"))
                opened = stack.enter_context(tarfile.open(fileobj=stream, mode="r:"))
                entries = [
                    (m.name, [m.size, version], partial(opened.extractfile, m), m.isfile())
                    for m in opened.getmembers()
                    if not m.isdir()
                ]
                _require_end(stream, opened.offset)
            for path, _, _, plain in entries:
                if path.startswith("/") or ".." in path.split("/") or not plain:
                    raise RequestError(
                        f"{source} holds {path!r}, {'a path outside' if plain else 'a link'}; "
                        "pack the data set again, with plain files only",
                        "unsafe-archive",
                    )
            paths = {PurePosixPath(path): (state, read) for path, state, read, _ in entries}
            start = _start(source, list(paths))
            below = {str(p.relative_to(start)): p for p in paths if p.is_relative_to(start)}
            yield {name: paths[path] for name, path in below.items() if _needed(name)}
    except Exception as error:
        if not _is_damage(error):
            raise
        raise RequestError(
            f"{source} cannot be unpacked ({error}): it is cut short, damaged or no such archive; "
            "copy it again from its source",
            "damaged-archive",
        ) from error


def _require_end(stream, position: int) -> None:
    """Require the block of zeros that ends a tar; tarfile accepts one cut between two files."""
    stream.seek(position)
    if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("its end is missing")
    while stream.read(2**20):  # gzip verifies its checksum at the end
        pass


def _start(source: Path, paths: list[PurePosixPath]) -> PurePosixPath:
    """Return the folder of an archive that holds ``images/`` and ``masks/``: its top or one below.

    Raises:
        RequestError: there is none, or several and none is named like the archive.
    """
    images, masks = (  # three parts at most, which __MACOSX/NAME/images/._a.png has not
        {path.parents[1] for path in paths if path.parent.name == part and len(path.parts) <= 3}
        for part in ("images", "masks")
    )
    found = images & masks
    named = found & {PurePosixPath(), PurePosixPath(_name(source))}
    if named or len(found) == 1:
        return min(named or found)
    some = f"several data sets ({', '.join(sorted(map(str, found)))})" if found else "no data set"
    raise RequestError(
        f"{source} holds {some}; expected one, as images/, masks/ and the lists trainval.txt and "
        "test.txt, at its top or in one folder",
        "no-data-set",
    )


def _record(target: Path) -> dict:
    """Return what the local copy was made from; empty where there is no copy.

    Raises:
        RequestError: the folder was not made by staging.
    """
    if (target / RECORD).is_file():
        try:
            record = json.loads((target / RECORD).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # emptied by a power cut: the copy is made again
            return {}
        if _is_record(record) and not any((target / p).is_symlink() for p in _PARTS):
            return record
    elif not target.is_file() and all(path.name == PART for path in target.glob("*")):
        return {}
    raise RequestError(
        f"{target} exists and was not made by staging; use it as it is, delete or rename it, or "
        "stage to another folder",
        "foreign-folder",
    )


def _is_record(record: object) -> bool:
    """Return whether JSON has the form of a record and lists only files that staging writes.

    A data set from elsewhere may bring a record of its own, and files that a record lists are
    deleted when the source no longer has them.
    """
    if not isinstance(record, dict) or not isinstance(files := record.get("files"), dict):
        return False
    try:
        valid = all(_needed(name) and b"\0" not in os.fsencode(name) for name in files)
    except UnicodeEncodeError:
        return False
    return valid and all(
        isinstance(state, list) and len(state) == 2 and type(state[0]) is int
        for state in files.values()
    )


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _require_space(root: Path, need: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if need > free:
        raise RequestError(
            f"the data set needs {need / 1e6:.1f} MB and {root} has {free / 1e6:.1f} MB free; "
            "free some space, or stage to another disk",
            "disk-full",
        )
