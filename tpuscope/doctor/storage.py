"""Drive, the data set, the compile cache and the run's folder."""

import errno
import tempfile
from pathlib import Path

from ..drives import DRIVE, MOUNT_DRIVE, is_remote
from ..errors import RequestError
from ..timeouts import call_with_timeout
from .machine import Machine, existing
from .report import TARGETS, Check, ok, problem, refused, warning
from .software import XLA

PATIENCE = 15.0  # seconds for a drive's answer


def drive(machine: Machine) -> list[Check]:
    """Google Drive as Colab mounts it: mounted, and a file can be written, read and deleted."""
    mounts = (machine.root / "proc/self/mounts").read_text(errors="surrogateescape")
    folder = machine.root / DRIVE.relative_to("/") / "MyDrive"
    try:
        if not call_with_timeout(PATIENCE, lambda: is_remote(DRIVE, mounts)):
            if machine.place() != "Colab":
                return []
            detail = "not mounted: what this session writes is gone when it ends"
            return [warning("Drive", detail, MOUNT_DRIVE)]
        call_with_timeout(PATIENCE, lambda: _write_read_delete(folder))
        return [ok("Drive", f"{DRIVE}/MyDrive: written, read and deleted a file")]
    except TimeoutError:
        detail = f"mounted, but gave no answer for {PATIENCE:.0f} s"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "empty Drive's bin, which counts, too"
            return [problem("Drive", f"full: {error.strerror}", fix, ())]
        detail = f"mounted, but cannot be used: {error.strerror or error}"
        if error.errno == errno.ENOTCONN:
            detail = "mounted, but the connection is dead (Transport endpoint is not connected)"
    remount = MOUNT_DRIVE.replace('")', '", force_remount=True)')
    return [problem("Drive", detail, f"{remount}; or Runtime > Restart session, then mount", ())]


def _write_read_delete(folder: Path) -> None:
    """A small file's life.

    Raises:
        OSError: a part of it did not work.
    """
    content = b"mshnet doctor"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".mshnet-doctor-") as file:
        file.write(content)
        file.flush()
        if Path(file.name).read_bytes() != content:
            raise OSError("what was written reads differently")


def data_set(folder: str | None) -> Check:
    """The data set, by the report of ``mshnet check-data``."""
    if folder is None:
        detail = "not given: training uses built-in scenes"
        return ok("data set", detail, "--dataset-dir DIR checks yours (images/, masks/, lists)")
    from mshnet.data.check import check
    from mshnet.data.stage import ARCHIVES

    path = Path(folder)
    archive = path.is_file() and path.name.lower().endswith(ARCHIVES)
    if path.exists() and (archive or is_remote(path)):
        kind = "an archive" if archive else "on a network drive, where reading each file is slow"
        fix = "train with --stage, which brings it to ./datasets, and check that"
        return warning("data set", f"{path} is {kind}; its files were not looked at", fix)
    try:
        report = check(path)
    except RequestError as error:
        return refused("data set", error)
    errors = report.errors()
    counts = ", ".join(f"{split.images} {name}" for name, split in report.splits.items())
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return problem("data set", f"{path}: {errors[0]}{more}", f"mshnet check-data {path}")
    if report.shared_names or report.shared_content:
        detail = f"{path}: {counts} images; some are in train and in test"
        return warning("data set", detail, f"mshnet check-data {path}")
    return ok("data set", f"{path}: {counts} images, every file reads")


def compile_cache(folder: str | None, on_tpu: bool) -> list[Check]:
    """The folder for compiled programs; nothing stays in it that was not there."""
    if folder is None:
        return []
    path = Path(folder)
    fault = _cannot_write(path)
    if fault:
        fix = "choose another folder with --compile-cache"
        return [problem("compile cache", f"{path} {fault}", fix, XLA)]
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    detail = f"{path}: {size / 1e6:.1f} MB in {len(files)} files"
    if on_tpu:
        detail += "; misses are reported for torch_xla 2.9 (pytorch/xla#9094)"
        return [ok("compile cache", detail)]
    detail += "; XLA on the CPU writes programs and cannot load them"
    return [warning("compile cache", detail, "leave --compile-cache out without a TPU")]


def run_folder(save_dir: str | None) -> list[Check]:
    """Where a run would be written."""
    if save_dir is None:
        return []
    from mshnet.training.checkpoint import CHECKPOINT, PREVIOUS

    path = Path(save_dir)
    fault = _cannot_write(path)
    if fault:
        detail, fix = f"{path} {fault}", "choose another folder with --save-dir"
        return [problem("run folder", detail, fix, TARGETS)]
    if any((path / name).exists() for name in (CHECKPOINT, PREVIOUS)):
        detail = f"{path} holds an earlier run, and a new one is refused there"
        return [warning("run folder", detail, f"go on with it: --resume {path}")]
    return [ok("run folder", f"{path}: can be written")]


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be made in a folder, or below the nearest one that is there."""
    if folder.exists() and not folder.is_dir():
        return "is a file"
    nearest = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"
