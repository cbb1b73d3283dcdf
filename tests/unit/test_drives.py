"""Network drives, from the kernel's table of mounts."""

from pathlib import Path

import pytest

from tpuscope.drives import is_remote, mount_of

MOUNTS = """\
/dev/sda / ext4 rw 0 0
tmpfs /content tmpfs rw 0 0
drive /content/drive fuse.drive rw 0 0
host:/x /mnt/with\\040space nfs4 rw 0 0
/dev/sdb /mnt/twice ext4 rw 0 0
share /mnt/twice cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "point", "remote"),
    [
        ("/content/drive/MyDrive/set", "/content/drive", True),
        ("/content/driver", "/content", False),
        ("/mnt/with space/set", "/mnt/with space", True),
        ("/mnt/twice/set", "/mnt/twice", True),  # the later mount hides the earlier
        ("/home", "/", False),
    ],
)
def test_the_innermost_mount_decides(path, point, remote):
    assert mount_of(Path(path), MOUNTS)[0] == Path(point)
    assert is_remote(Path(path), MOUNTS) is remote


def test_a_remote_root_is_the_machines_own_disk():
    assert not is_remote(Path("/home"), "host:/x / nfs rw 0 0\n")
