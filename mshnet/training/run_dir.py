"""The folder that a run owns and locks, and the log in it."""

import contextlib
import datetime
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpuscope.errors import RequestError
from tpuscope.files import remove_parts, require_writable, write_atomic
from tpuscope.timeouts import call_with_timeout

from .checkpoint import CHECKPOINT, LARGEST, PREVIOUS, WEIGHTS
from .config import Config

LOG = "metrics.jsonl"
CONFIG = "config.json"
CURVES = "curves.png"
EXAMPLES = "examples.png"
FILES = (CHECKPOINT, PREVIOUS, WEIGHTS, LOG, CONFIG, CURVES, EXAMPLES)  # that a run writes
HIGHEST = 1e38  # number in the log: what float32 holds
LOCK = ".lock"  # held by the process that writes into the folder
TIMEOUT = 30.0  # seconds for a drive to answer

_locks: dict[Path, int] = {}  # folder → open file, of the locks that this process holds


def claim(
    save_dir: str | Path | None, bytes_needed: int, resuming: bool, auto: bool = False
) -> tuple[Path, bool]:
    """Create and lock the run's folder, and check that it can take what will be written.

    The lock is held until :func:`release`, or until the process ends in whatever way.

    Args:
        save_dir: the folder; None makes ``weight/MSHNet-<timestamp>``.
        bytes_needed: of all files of a run together.
        resuming: an earlier run in the folder is expected rather than refused.
        auto: as in :func:`require_vacant`.

    Returns:
        The folder, and whether it was made just now.

    Raises:
        RequestError: not writable, too little space, in use by another process, or holding files
            that the run would replace; nothing was written then.
    """
    if save_dir is None:
        stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        save_dir = Path("weight") / f"MSHNet-{stamp}"
    folder = Path(save_dir)
    created = not folder.exists()
    require_writable("--save-dir", folder)
    _lock("--save-dir", folder)
    try:
        if not resuming:
            require_vacant("--save-dir", folder, auto, resume=str(folder))
        free = shutil.disk_usage(folder).free
        if free < bytes_needed:
            raise RequestError(
                f"--save-dir {folder} has {free / 1e6:.0f} MB free, a run writes up to "
                f"{bytes_needed / 1e6:.0f} MB; free some space or choose another folder",
                code="disk-full",
            )
        remove_parts(folder, FILES)
    except BaseException:
        release(folder, created)
        raise
    return folder, created


def release(folder: Path, created: bool) -> None:
    """Unlock a claimed folder; one that was made for the run and is still empty is removed."""
    _unlock(folder)
    if created:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def locked(flag: str, folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if needed.

    Raises:
        RequestError: another process writes there.
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _lock(flag, folder)
    try:
        yield
    finally:
        _unlock(folder)


def _lock(flag: str, folder: Path) -> None:
    """Take the lock of a folder for this process, unless it has it.

    A POSIX record lock (``lockf``) belongs to one process and ends with it, also when it is killed
    and its loader processes live on for some seconds; they would inherit the lock of ``flock``.

    Raises:
        RequestError: another process has it.
    """
    if os.name == "nt":  # has no such locks
        return
    import fcntl

    key, path = folder.resolve(), folder / LOCK
    while key not in _locks:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise RequestError(
                    f"{flag} {folder}: another run is being written there; wait for its end, or "
                    "choose another folder",
                    code="folder-in-use",
                ) from error
            path.unlink(missing_ok=True)
            return  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                _locks[key] = file
                return
        os.close(file)  # the process that had it removed it before we got it: once more


def _unlock(folder: Path) -> None:
    file = _locks.pop(folder.resolve(), None)
    if file is not None:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(file)


def require_vacant(flag: str, folder: Path, auto: bool = False, resume: str = "auto") -> None:
    """Check that a new run would replace nothing in a folder: its own, or that of its backup.

    What a run left that ended before its first epoch counts for nothing.

    Args:
        flag: that named the folder, for messages.
        folder: need not exist.
        auto: the run may also replace one that ended while it saved its first epoch, before there
            was a checkpoint: ``--resume auto`` found nothing to continue.
        resume: value of ``--resume`` that continues the run in the folder.

    Raises:
        RequestError: names the file that would be replaced, or the folder does not answer.
    """
    try:
        present = call_with_timeout(TIMEOUT, lambda: _present(folder))
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or f"no answer in {TIMEOUT:.0f} s"
        raise RequestError(
            f"{flag} {folder} cannot be read ({reason}); mount it again, or choose another folder",
            code="unreadable-folder",
        ) from error
    if not present or _barely_begun(folder, present, auto):
        return
    if present[0] in (CHECKPOINT, PREVIOUS):
        raise RequestError(
            f"{flag} {folder} holds an earlier run; continue it with --resume {resume}, "
            "or choose another folder",
            code="earlier-run",
        )
    raise RequestError(
        f"{flag} {folder}: a new run would replace {folder / present[0]}; choose another folder "
        f"(or --resume auto, if a run that is to go on is there)",
        code="foreign-file",
    )


def _present(folder: Path) -> list[str]:
    """Return which of a run's files a folder has.

    Raises:
        OSError: the folder cannot be read, so it may have any.
    """
    found = []
    for name in FILES:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (folder / name).lstat()
            found.append(name)
    return found


def _barely_begun(folder: Path, present: list[str], auto: bool) -> bool:
    """Whether the files are those of a run in this folder before its first checkpoint."""
    replaceable = {CONFIG, LOG, WEIGHTS} if auto else {CONFIG, LOG}
    return (
        set(present) <= replaceable
        and folder.resolve() in recorded_folders(read_config(folder))
        and len(_lines(folder)) <= auto
    )


def recorded_folders(config: dict) -> set[Path]:
    """Return the run's folder and its backup as its settings record them."""
    named = [config.get(name) for name in ("save_dir", "backup")]
    return {Path(name).resolve() for name in named if isinstance(name, str) and "\0" not in name}


def require_own(folder: Path, backup: Path) -> None:
    """Check that what lies in a folder belongs to the run of a backup, which replaces it.

    Raises:
        RequestError: names a file of another run, or of none.
    """
    present = _present(folder)
    known = recorded_folders(read_config(folder))
    if present and not {folder.resolve(), backup.resolve()} & known:
        raise RequestError(
            f"--save-dir {folder}: the run in {backup} would replace {folder / present[0]}, which "
            "is not its own; choose another --save-dir",
            code="foreign-file",
        )


def write_config(folder: Path, config: Config) -> None:
    """Write ``config.json``: every setting of the run."""
    write_atomic(folder / CONFIG, json.dumps(config.as_dict(), indent=2) + "\n")


def read_config(folder: Path) -> dict:
    """Return what ``config.json`` records; an unreadable one records nothing."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _lines(folder: Path) -> list[str]:
    path = folder / LOG
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def read_log(folder: Path, before: int | None = None) -> list[dict]:
    """Return the epochs in ``metrics.jsonl``.

    A line that a killed run left half-written is dropped, as is one that is no record of an epoch.

    Args:
        before: only epochs below this one.
    """
    records = []
    for line in _lines(folder):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_record(record) and (before is None or record["epoch"] < before):
            records.append(record)
    return records


def _is_record(record: Any) -> bool:
    """Whether it has an epoch and a loss, and numbers (null is NaN) for what is drawn."""
    if not isinstance(record, dict) or "loss" not in record or type(record.get("epoch")) is not int:
        return False
    drawn = [record.get(name) for name in ("loss", "iou", "niou", "pd", "fa")]
    right = all(
        value is None or (type(value) in (int, float) and not abs(value) > HIGHEST)
        for value in drawn
    )
    return right and 0 <= record["epoch"] < LARGEST


def rewrite_log(folder: Path, records: list[dict]) -> None:
    """Replace the log, as a resumed run does with the epochs that it will not repeat."""
    write_atomic(folder / LOG, "".join(to_json(record) + "\n" for record in records))


def append_log(folder: Path, record: dict) -> None:
    """Add one epoch to the log."""
    with open(folder / LOG, "a") as file:
        file.write(to_json(record) + "\n")


def to_json(value: Any) -> str:
    """Return one line of JSON; NaN (Pd without targets) and infinity, which JSON lacks, as null."""

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: clean(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [clean(entry) for entry in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(clean(value), allow_nan=False)
