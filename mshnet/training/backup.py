"""A second copy of a run, usually on Drive, made in the background while training goes on.

Training writes to the local disk only. Whatever happens to the copy (Drive is slow, full,
read-only, unmounted, its folder deleted) is reported in one line, and the copy is tried again.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from tpuscope.drives import mount_of
from tpuscope.files import remove_parts, write_part

from .checkpoint import CHECKPOINT, PREVIOUS, WEIGHTS, is_whole
from .run_dir import FILES

BLOCK = 1 << 20
SOON = 5.0  # seconds that close() waits before it reports that it waits


class Backup:
    """Copies a run's folder to another one whenever asked; never changes the local files.

    A copy is written under a temporary name, read back and compared, and only then renamed. So
    the target always holds whole files: the best weights, a checkpoint, the checkpoint before.

    Args:
        folder: the run's folder, on the local disk.
        target: the folder of the copy; made if needed. If it cannot be written, a message says so
            and training goes on.
        log: takes a message for people; called from another thread.
        retry: seconds between attempts while something is wrong.
    """

    def __init__(
        self, folder: Path, target: Path, log: Callable[[str], None] = print, retry: float = 30.0
    ):
        self.folder, self.target = Path(folder), Path(target)
        self._log = log
        self._retry = retry
        self._verified: dict[str, tuple] = {}  # name → state of the local file that has arrived
        self._trouble: str | None = None
        self._wake = threading.Condition()
        self._asked = True  # the first pass shows at once whether the target works
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="backup", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Ask for a copy and return at once; requests during a copy make one more copy."""
        with self._wake:
            self._asked = True
            self._wake.notify()

    def close(self, patience: float = 120.0) -> list[str]:
        """Make the last copy, and report the outcome.

        Args:
            patience: seconds to wait at most. A copy that still hangs then is abandoned; its
                thread does not keep the process alive.

        Returns:
            Names of the files that did not arrive.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(min(SOON, patience))
        if self._thread.is_alive() and patience > SOON:
            self._log(f"backup to {self.target}: copying, for {patience - SOON:.0f} s more at most")
            self._thread.join(patience - SOON)
        late = self._thread.is_alive()
        # From the local disk and memory only: the target may hang.
        states = {name: _state((self.folder / name).stat()) for name in self._names()}
        missing = sorted(name for name in states if self._verified.get(name) != states[name])
        if missing:
            reason = (
                f"not done after {patience:.0f} s" if late else self._trouble or "changed since"
            )
            self._log(
                f"backup: not in {self.target}: {', '.join(missing)} ({reason}); "
                f"they are in {self.folder}"
            )
        else:
            self._log(f"backup: complete in {self.target}")
        return missing

    def _run(self) -> None:
        # Here rather than in the constructor: a mount that hangs may hang this thread only.
        self._point = mount_of(self.target)[0]
        with contextlib.suppress(OSError):
            self._require_target()
            remove_parts(self.target, {*FILES, *self._names()})
        closing = False
        while not closing:
            with self._wake:
                timeout = self._retry if self._trouble else None
                self._wake.wait_for(lambda: self._asked or self._closing, timeout)
                self._asked, closing = False, self._closing
            self._pass()

    def _pass(self) -> None:
        """Copy what is new; report trouble when it begins and when it ends."""
        try:
            self._copy()
            trouble = None
        except OSError as error:
            trouble = error.strerror or str(error)
        if trouble != self._trouble and not self._closing:  # close() has the last word
            self._log(
                f"backup to {self.target}: {trouble}; training goes on, the run is whole in "
                f"{self.folder}; trying again"
                if trouble
                else f"backup to {self.target}: works again"
            )
        self._trouble = trouble

    def _copy(self) -> None:
        """Copy every file that can be copied.

        Raises:
            OSError: the first failure; the other files have been copied.
        """
        errors: dict[str, OSError] = {}
        for name, source in self._sources():
            state = _state(os.fstat(source.fileno()))  # first: the log grows while it is read
            try:
                self._require_target()
                if not self._has(name, source, state):
                    if name == CHECKPOINT and WEIGHTS in errors:
                        raise errors[WEIGHTS]  # a checkpoint needs the best weights it names
                    _place(
                        source,
                        self.target / name,
                        aside=self.target / PREVIOUS if name == CHECKPOINT else None,
                    )
                self._verified[name] = state
            except OSError as error:
                self._verified.pop(name, None)
                errors[name] = error
        for error in errors.values():
            raise error

    def _names(self) -> list[str]:
        # The target's previous checkpoint is made by renaming.
        return [name for name in _files(self.folder) if name != PREVIOUS]

    def _sources(self) -> Iterator[tuple[str, BufferedReader]]:
        """Yield the run's files, open: a file replaced while it is read keeps its old content.

        The checkpoint comes last but is opened first, so the best weights that it names, or later
        ones, are copied before it however often both are replaced meanwhile.
        """
        with contextlib.ExitStack() as stack:
            # A file that is missing is being replaced right now; a request will follow.
            newest = None
            with contextlib.suppress(FileNotFoundError):
                newest = stack.enter_context(open(self.folder / CHECKPOINT, "rb"))
            for name in self._names():
                if name != CHECKPOINT:
                    with (
                        contextlib.suppress(FileNotFoundError),
                        open(self.folder / name, "rb") as source,
                    ):
                        yield name, source
            if newest:
                yield CHECKPOINT, newest

    def _require_target(self) -> None:
        """Make the target if it is gone, but only on the drive where it was.

        Raises:
            OSError: the drive is unmounted; its mount point is then a folder of the local disk.
        """
        if mount_of(self._point)[0] != self._point:
            raise OSError(f"{self._point} is not mounted any more")
        self.target.mkdir(parents=True, exist_ok=True)
        if self.target.samefile(self.folder):
            raise OSError("it is the run's own folder")

    def _has(self, name: str, source: BufferedReader, state: tuple) -> bool:
        """Return whether the target has this file as it is now."""
        path = self.target / name
        if not path.is_file() or path.stat().st_size != os.fstat(source.fileno()).st_size:
            return False
        if name in self._verified:
            return self._verified[name] == state
        # An earlier process may have copied it.
        same = _sha256(path) == hashlib.file_digest(source, "sha256").digest()
        source.seek(0)
        return same


def restore(target: Path, folder: Path, overwrite: bool = False) -> list[str]:
    """Copy a backup into the folder of a run, on a new machine.

    Args:
        target: the backup.
        folder: the run's; made if needed.
        overwrite: replace what is there, because the backup is further in training.

    Returns:
        Names of the files copied.

    Raises:
        OSError: the backup cannot be read, or the folder not written. Files copied by then are
            whole, the newest checkpoint is copied last, and another call copies the rest.
    """
    target, folder = Path(target), Path(folder)
    names = [name for name in _files(target) if overwrite or not (folder / name).exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with open(target / name, "rb") as source:
            _place(source, folder / name)
    return names


def _files(folder: Path) -> list[str]:
    """Return the names of a run's files in copying order: small ones, the best, checkpoints."""
    large = (WEIGHTS, PREVIOUS, CHECKPOINT)
    # Hidden files are temporary ones.
    names = [p.name for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
    return sorted(names, key=lambda name: (large.index(name) if name in large else -1, name))


def _state(status: os.stat_result) -> tuple:
    """Return what differs once a file was replaced or extended."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _place(source: BinaryIO, path: Path, aside: Path | None = None) -> None:
    """Write a copy of an open file, whole or not at all.

    Args:
        source: read from its current position.
        path: the copy.
        aside: new name of the file that the copy replaces, if that is a whole checkpoint; a damaged
            one must not take the place of the last intact one.

    Raises:
        OSError: not written, or what was written reads differently.
    """
    digest = hashlib.sha256()

    def copy(file: BinaryIO) -> None:
        while block := source.read(BLOCK):
            file.write(block)
            digest.update(block)
        if file.tell() < os.fstat(source.fileno()).st_size:
            raise OSError(f"{path.name} could be read in part only")

    part = write_part(path, copy)
    try:
        if _sha256(part) != digest.digest():
            raise OSError(f"the copy of {path.name} reads differently from what was written")
        if aside and is_whole(path):
            os.replace(path, aside)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a bad copy only takes space
            part.unlink()
        raise
