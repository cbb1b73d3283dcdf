"""Memory, shared memory, disks, Google Drive, and the folder of compiled programs."""

import errno
import tempfile
from pathlib import Path

from ..drives import DRIVE, MOUNT_DRIVE, is_remote
from ..files import cache_folder
from ..timeouts import call_with_timeout
from .machine import Machine, existing
from .report import Check, ok, problem, warning
from .software import XLA

DRIVE_TIMEOUT = 15.0  # seconds
# A process that imports torch_xla and trains a net of a few hundred weights on the CPU peaks at
# 1.04 GB (ru_maxrss, the probe of this package); without XLA at 0.72.
MEMORY = 2e9
SHARED_MEMORY = 512e6  # Docker gives 64 MB, a virtual machine half of its memory
DISK = 1e9  # a checkpoint or two


def memory(machine: Machine) -> list[Check]:
    """Report the memory of the machine or its container."""
    found = machine.memory()
    if found is None:
        return []
    total, free = found
    detail = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free >= MEMORY:
        return [ok("memory", detail)]
    detail += "; PyTorch with XLA takes 1 GB before any model or data"
    return [warning("memory", detail, "end other programs; take smaller batches, fewer workers")]


def shared_memory(machine: Machine) -> list[Check]:
    """Report /dev/shm, through which a DataLoader's workers hand over their batches."""
    folder = machine.root / "dev/shm"
    if not folder.is_dir():
        return []
    free = machine.free(folder)
    detail = f"/dev/shm has {free / 1e6:,.0f} MB free"
    if free >= SHARED_MEMORY:
        return [ok("shared memory", detail)]
    detail += "; loader workers that need more end in a 'Bus error'"
    fix = "DataLoader(num_workers=0), or in Docker: docker run --shm-size=2g"
    return [warning("shared memory", detail, fix)]


def disks(machine: Machine) -> list[Check]:
    """Report the room in the working folder and in the cache folder."""
    checks = []
    for folder, fix in (
        (Path.cwd(), "free some space, or work on another disk"),
        (cache_folder(""), "free some space, or set XDG_CACHE_HOME to another disk"),
    ):
        place, free = existing(folder), machine.free(folder)
        detail = f"{free / 1e9:.1f} GB free in {place}"
        checks.append(ok("disk", detail) if free >= DISK else warning("disk", detail, fix))
    return checks


def drive(machine: Machine) -> list[Check]:
    """Check Google Drive as Colab mounts it: a file can be written, read and deleted."""
    mounts = (machine.root / "proc/self/mounts").read_text(errors="surrogateescape")
    folder = machine.root / DRIVE.relative_to("/") / "MyDrive"
    try:
        if not call_with_timeout(DRIVE_TIMEOUT, lambda: is_remote(DRIVE, mounts)):
            if machine.place() != "Colab":
                return []
            detail = "not mounted: what this session writes is gone when it ends"
            return [warning("Drive", detail, MOUNT_DRIVE)]
        call_with_timeout(DRIVE_TIMEOUT, lambda: _write_read_delete(folder))
        return [ok("Drive", f"{DRIVE}/MyDrive: wrote, read and deleted a file")]
    except TimeoutError:
        detail = f"mounted, but did not answer for {DRIVE_TIMEOUT:.0f} s"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "empty Drive's bin, which also counts"
            return [problem("Drive", f"full: {error.strerror}", fix, ())]
        detail = f"mounted, but cannot be used: {error.strerror or error}"
        if error.errno == errno.ENOTCONN:
            detail = "mounted, but the connection is dead (Transport endpoint is not connected)"
    remount = MOUNT_DRIVE.replace('")', '", force_remount=True)')
    return [problem("Drive", detail, f"{remount}; or Runtime > Restart session, then mount", ())]


def _write_read_delete(folder: Path) -> None:
    """Write a small file, read it back and delete it.

    Raises:
        OSError: one of these failed.
    """
    content = b"tpuscope doctor"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".tpuscope-doctor-") as file:
        file.write(content)
        file.flush()
        if Path(file.name).read_bytes() != content:
            raise OSError("the file that was written reads differently")


def compile_cache(folder: str | None, on_tpu: bool) -> list[Check]:
    """Check the folder for compiled programs; leave it as it was."""
    if folder is None:
        return []
    path = Path(folder)
    fault = write_fault(path)
    if fault:
        fix = "choose another folder for compiled programs"
        return [problem("compile cache", f"{path} {fault}", fix, XLA)]
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    detail = f"{path}: {size / 1e6:.1f} MB in {len(files)} files"
    if on_tpu:
        detail += "; misses are reported for torch_xla 2.9 (pytorch/xla#9094)"
        return [ok("compile cache", detail)]
    detail += "; XLA on the CPU writes programs and cannot load them"
    return [warning("compile cache", detail, "use no compile cache without a TPU")]


def write_fault(folder: Path) -> str | None:
    """Return why no file can be written in a folder or its nearest parent; None if one can."""
    if folder.exists() and not folder.is_dir():
        return "is a file"
    try:
        with tempfile.TemporaryFile(dir=existing(folder)):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"
