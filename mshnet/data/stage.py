"""A data set brought from a slow place to the local disk, once.

A mounted Google Drive or bucket answers each opened file over the network, and training opens
thousands. ``stage`` copies a folder or unpacks an archive, and leaves ``.staged.json`` beside the
files: what the copy was made from. The next call compares that and brings only what differs.

Each file is written in ``.part`` and renamed into its place, and stale files go before a new record
is written. So a file that the record lists and the disk has is whole and current, whenever a call
was interrupted, and the next one goes on from there.
"""

import contextlib
import errno
import gzip
import json
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

from tpuscope.drives import DRIVE, MOUNT_DRIVE
from tpuscope.errors import RequestError
from tpuscope.progress import progress as bar

from .layout import SUFFIXES, DataFolder

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
RECORD, PART = ".staged.json", ".part"
THREADS = 16  # a request to a drive is mostly waiting
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What Python's readers raise for an archive that is cut short, damaged, encrypted, or none at all.
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,
)


def stage(source: str | Path, root: str | Path = "datasets", *, progress: bool = True) -> Path:
    """The local folder with what training reads: ``images/``, ``masks/`` and the lists.

    Args:
        source: a data set's folder, or a .zip, .tar, .tar.gz or .tgz that holds one.
        root: folder on the local disk; the copy is ``root/NAME``. A data set that lies below it
            already is returned as it is.
        progress: show a bar to people; logs get none in any case.

    Raises:
        RequestError: the source holds no whole data set, ``root/NAME`` is something else's, or a
            disk is full or gone. Whole files stay, and the next call goes on from there.
    """
    source, root = Path(source).absolute(), Path(root)
    try:
        if source.is_dir() and source.resolve().is_relative_to(root.resolve()):
            return DataFolder(source).folder
        return _bring(source, root / _name(source), progress)
    except (OSError, EOFError) as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        fix = "free some space" if full else "see that both can be reached (drives drop out)"
        raise RequestError(
            f"bringing {source} to {root} stopped ({error.strerror if full else error}); {fix}, "
            "then do the same again"
        ) from error


def _name(source: Path) -> str:
    """Name of the local folder, of a source that may be one."""
    suffix = next((s for s in ARCHIVES if source.name.lower().endswith(s)), None)
    if source.is_dir():
        return source.name
    if source.is_file() and suffix:
        return source.name[: -len(suffix)]
    if source.exists():
        fault = f"is neither a folder nor an archive; expected {', '.join(ARCHIVES)}"
    elif source.is_relative_to(DRIVE) and not DRIVE.is_mount():
        fault = f"is not there, because Drive is not mounted; first run {MOUNT_DRIVE}"
    else:
        fault = "does not exist; name the folder of a data set, or an archive of it"
    raise RequestError(f"{source} {fault}")


def _bring(source: Path, target: Path, progress: bool) -> Path:
    """Make the target hold what the source holds, and no file of an earlier source."""
    state = source.stat()
    version = [state.st_size, state.st_mtime_ns] if source.is_file() else None
    record = _record(target)
    same, before = record.get("source") == str(source), record.get("files", {})
    unchanged = same and record.get("version") == version
    if version and unchanged and all(_has(target / n, size) for n, (size, _) in before.items()):
        return target  # the archive was not even opened
    with _folder(source) if source.is_dir() else _archive(source, version) as found:
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
            # An archive is one file: one reader goes through it from its beginning to its end.
            threads = 1 if version else THREADS
            title = f"stage {source.name}" if progress else None
            _write({name: found[name] for name in missing}, target, threads, title)
        except _BROKEN:
            if version and not same:  # nothing stays of a damaged archive
                shutil.rmtree(target, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _write(found: dict, target: Path, threads: int, title: str | None) -> None:
    """Write each file in the target's ``.part`` and rename it when it is whole."""
    for folder in {(target / name).parent for name in found}:
        folder.mkdir(exist_ok=True)

    def write(number: int, name: str) -> None:
        part = target / PART / str(number)
        (size, _), read = found[name]
        with read() as content, part.open("wb") as file:
            shutil.copyfileobj(content, file, 2**20)
            if file.tell() != size:
                raise EOFError(f"{name} gave {file.tell()} bytes of {size}")
        os.replace(part, target / name)

    pool = ThreadPoolExecutor(threads)
    try:
        done = (pool.map if threads > 1 else map)(write, range(len(found)), found)
        for _ in bar(done, title, len(found), unit="file") if title else done:
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for a thousand files


@contextlib.contextmanager
def _folder(source: Path) -> Iterator[dict]:
    """Size and time, and a reader, of each file that training reads of a folder."""
    DataFolder(source)  # refuses what is none
    found = {}
    for part in ("", "images", "masks", "img_idx"):
        if not (source / part).is_dir():
            continue
        with os.scandir(source / part) as entries:
            for entry in entries:
                name = f"{part}/{entry.name}".removeprefix("/")
                if _needed(name) and entry.is_file():
                    state = entry.stat()
                    found[name] = [state.st_size, state.st_mtime_ns], partial(open, entry, "rb")
    for part in ("images", "masks"):  # also when a drive drops out between two lines
        if not any(name.startswith(f"{part}/") for name in found):
            raise RequestError(f"{source / part} holds no image; expected {', '.join(SUFFIXES)}")
    yield found


def _needed(name: str) -> bool:
    """Whether a path below a data set's folder is an image, a mask or a list."""
    path = PurePosixPath(name)
    if path.name.startswith("."):  # a file manager's, such as ._NAME.png
        return False
    if str(path.parent) in ("images", "masks"):
        return path.suffix.lower() in SUFFIXES
    return str(path.parent) in (".", "img_idx") and path.suffix == ".txt"


@contextlib.contextmanager
def _archive(source: Path, version: list[int]) -> Iterator[dict]:
    """Size and checksum, and a reader, of each file that training reads of an archive.

    A tar has no checksums: with another version of the archive all its files count as changed.
    Files are read and written here, never extracted by their own paths, so that nothing but plain
    files below the target can come of it. An archive that asks for more is refused all the same.
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
                        "pack the data set again, with plain files only"
                    )
            paths = {PurePosixPath(path): (state, read) for path, state, read, _ in entries}
            start = _start(source, list(paths))
            below = {str(p.relative_to(start)): p for p in paths if p.is_relative_to(start)}
            yield {name: paths[path] for name, path in below.items() if _needed(name)}
    except _BROKEN as error:
        raise RequestError(
            f"{source} cannot be unpacked ({error}): it is cut short, damaged or no such archive; "
            "copy it again from where it is whole"
        ) from error


def _require_end(stream, position: int) -> None:
    """tarfile takes a tar that is cut between two files as whole; its end is a block of zeros."""
    stream.seek(position)
    if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("its end is missing")
    while stream.read(2**20):  # gzip compares its checksum at the very end
        pass


def _start(source: Path, paths: list[PurePosixPath]) -> PurePosixPath:
    """The folder that holds ``images/`` and ``masks/`` in an archive: its top, or one in it."""
    images, masks = (  # three parts at most: __MACOSX/NAME/images/._a.png is none
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
        "test.txt, at its top or in one folder"
    )


def _record(target: Path) -> dict:
    """What the local copy was made from; empty where there is none.

    Raises:
        RequestError: something else is there.
    """
    try:
        return json.loads((target / RECORD).read_text(encoding="utf-8"))
    except ValueError:  # emptied by a power cut: the copy is ours, and made anew
        return {}
    except (FileNotFoundError, NotADirectoryError):
        if target.is_file() or any(path.name != PART for path in target.glob("*")):
            raise RequestError(
                f"{target} is there already and was not made by staging; use it as it is, delete "
                "or rename it, or stage to another folder"
            ) from None
        return {}


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
            "free some space, or stage to another disk"
        )
