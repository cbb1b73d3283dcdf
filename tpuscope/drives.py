"""Network drives: what is mounted where, without touching a mount that may hang."""

import os
import re
from pathlib import Path

DRIVE = Path("/content/drive")  # where Colab mounts Google Drive
MOUNT_DRIVE = f'from google.colab import drive; drive.mount("{DRIVE}")'
_REMOTE = re.compile(r"fuse|nfs|cifs|smb")  # beginnings of the types of network file systems


def is_remote(path: Path, mounts: str | None = None) -> bool:
    """Return whether a path lies on a network file system, as Drive does on Colab.

    Args:
        path: need not exist.
        mounts: text in the form of ``/proc/self/mounts``; None reads that file.
    """
    point, kind = mount_of(path, mounts)
    return point != Path("/") and _REMOTE.match(kind) is not None


def mount_of(path: Path, mounts: str | None = None) -> tuple[Path, str]:
    """Return the mount point that a path lies on, and the type of its file system.

    Read from the kernel's table: touching the mount itself may hang.
    """
    path = Path(path).resolve()
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        except OSError:  # not Linux
            if path.is_relative_to(DRIVE):
                return DRIVE, "fuse.drive"
            return next(p for p in (path, *path.parents) if os.path.ismount(p)), ""
    found, kind = Path("/"), ""
    for escaped, its_kind in re.findall(r"^\S+ (\S+) (\S+)", mounts, re.MULTILINE):
        # A space is written \040. Of two mounts on one point, the later hides the earlier.
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), escaped))
        if path.is_relative_to(point) and point.is_relative_to(found):
            found, kind = point, its_kind
    return found, kind
