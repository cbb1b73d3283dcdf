"""The second copy of a run: targets that are full, read-only, unmounted, deleted, or hang."""

import io
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mshnet.training import backup
from mshnet.training.backup import Backup, restore
from tpuscope.drives import is_remote

SMALL = ("config.json", "curves.png", "examples.png", "metrics.jsonl")
NAMES = (*SMALL, "checkpoint.pkl", "weight.pkl")


def put(folder, **contents):
    """Replace files as training does: under a temporary name, then renamed."""
    folder.mkdir(exist_ok=True)
    for stem, content in contents.items():
        part = folder / f".{stem}.part"
        part.write_bytes(content)
        os.replace(part, folder / f"{stem}.pkl")


def newest(number, size=5000):
    """A checkpoint as far as it matters here: an archive with checksums."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo("run/data.pkl"), bytes([number]) * size)
    return content.getvalue()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def eventually(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def holds(path, content):
    """Whether a file has come to hold this; it may be between two names right now."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def mount(*arguments):
    if not shutil.which("mount"):
        return False
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode == 0


@pytest.fixture
def run(tmp_path):
    """A run's folder after an epoch, with what a backup has to leave alone."""
    folder = tmp_path / "run"
    put(folder, weight=b"best 1" * 1000, checkpoint=newest(1))
    for name in SMALL:
        (folder / name).write_text(f"content of {name}")
    (folder / "checkpoint.previous.pkl").write_bytes(newest(0))
    (folder / ".weight.pkl.12.part").write_bytes(b"half")
    (folder / ".checkpoint.pkl.new").write_bytes(b"whole, and about to be renamed")
    (folder / ".lock").write_bytes(b"")
    (folder / "folder").mkdir()
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "drive" / "MyDrive" / "run"


@pytest.fixture
def said():
    return []


@pytest.fixture
def start(run, target, said):
    """Starts backups, and ends them after the test."""
    started = []

    def start(folder=run, target=target, retry=0.05):
        started.append(Backup(folder, target, said.append, retry))
        return started[-1]

    yield start
    for one in started:
        one.close(patience=10)


@pytest.fixture
def drive(tmp_path):
    """A real file system of 1 MiB, to be filled, made read-only, and unmounted."""
    point = tmp_path / "drive"
    point.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", point):
        pytest.skip("mounting a file system is not permitted here")
    yield point
    while os.path.ismount(point):
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.fixture
def placed(monkeypatch):
    """Names in the order in which they were copied; ``before[name]`` is called before a copy."""
    names, before, place = [], {}, backup._place

    def spy(source, path, aside=None):
        names.append(path.name)
        before.pop(path.name, lambda: None)()
        place(source, path, aside)

    monkeypatch.setattr(backup, "_place", spy)
    return SimpleNamespace(names=names, before=before)


# What arrives, and in which order.


def test_every_file_of_the_run_arrives_and_the_run_is_not_touched(run, target, start, said):
    before = {path.name: path.stat() for path in run.iterdir()}
    assert start().close() == []
    assert {name: (run / name).read_bytes() for name in NAMES} == files(target)
    assert said == [f"backup: complete in {target}"]
    after = {path.name: path.stat() for path in run.iterdir()}
    assert {name: (s.st_ino, s.st_mtime_ns) for name, s in after.items()} == {
        name: (s.st_ino, s.st_mtime_ns) for name, s in before.items()
    }


def test_small_files_come_first_then_the_best_then_the_checkpoint(start, placed):
    assert start().close() == []
    assert placed.names == [*SMALL, "weight.pkl", "checkpoint.pkl"]


def test_what_has_arrived_is_neither_copied_nor_read_again(run, target, start, placed, monkeypatch):
    first = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    placed.names.clear()
    read, sha256 = [], backup._sha256
    monkeypatch.setattr(backup, "_sha256", lambda path: (read.append(path.name), sha256(path))[1])
    with open(run / "metrics.jsonl", "a") as log:
        log.write("one more epoch")
    first.request()
    assert first.close() == []
    assert placed.names == ["metrics.jsonl"]
    assert read == [f".metrics.jsonl.{os.getpid()}.part"]
    assert holds(target / "metrics.jsonl", (run / "metrics.jsonl").read_bytes())


def test_a_resumed_run_finds_its_files_in_the_target_and_copies_only_what_differs(
    run, target, start, placed
):
    start().close()
    placed.names.clear()
    curves = (run / "curves.png").read_bytes()
    (run / "curves.png").write_bytes(curves[::-1])  # of the same size
    assert start().close() == []
    assert placed.names == ["curves.png"]
    assert not (target / "checkpoint.previous.pkl").exists(), "the same checkpoint twice"


def test_the_target_keeps_the_checkpoint_before(run, target, start):
    one = start()
    for number in range(2, 5):
        eventually(lambda: (target / "checkpoint.pkl").exists(), "no first copy")
        put(run, checkpoint=newest(number))
        one.request()
        eventually(lambda n=number: holds(target / "checkpoint.pkl", newest(n)), "no copy")
    assert one.close() == []
    assert (target / "checkpoint.previous.pkl").read_bytes() == newest(3)


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_last_whole_one(run, target, start):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    for content in (newest(2)[:-9], newest(3)):  # damaged in the run's folder already
        put(run, checkpoint=content)
        one.request()
        eventually(lambda new=content: holds(target / "checkpoint.pkl", new), "no copy")
        assert (target / "checkpoint.previous.pkl").read_bytes() == newest(1)
    assert one.close() == []


def test_a_file_replaced_while_it_is_copied_arrives_whole(run, target, start, placed):
    old, new = (run / "weight.pkl").read_bytes(), b"best 2" * 2000
    copies = []
    placed.before["weight.pkl"] = lambda: put(run, weight=new)
    placed.before["checkpoint.pkl"] = lambda: copies.append((target / "weight.pkl").read_bytes())
    one = start()
    eventually(lambda: placed.names, "nothing was copied")
    assert one.close() == []
    assert copies == [old]
    assert (target / "weight.pkl").read_bytes() == new


def test_a_checkpoint_never_speaks_of_a_best_that_is_not_there(run, target, start, placed):
    copies = []

    def look():
        copies.append((target / "checkpoint.pkl").read_bytes())

    def next_epoch():
        put(run, weight=b"best 2", checkpoint=newest(2))
        placed.before["config.json"] = look

    placed.before["weight.pkl"] = next_epoch
    first = (run / "checkpoint.pkl").read_bytes()
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    (run / "config.json").write_text("changed")
    assert one.close() == []
    assert copies == [first], "the checkpoint of the epoch whose best came later"
    assert (target / "weight.pkl").read_bytes() == b"best 2"
    assert (target / "checkpoint.pkl").read_bytes() == newest(2)


def test_what_a_killed_process_left_half_written_is_removed_and_nothing_else(target, start):
    target.mkdir(parents=True)
    foreign = [".other.part", ".mine.pkl.12.part", ".weight.pkl.part"]
    for name in (*foreign, ".weight.pkl.12.part", ".curves.png.7.part"):
        (target / name).write_bytes(b"half")
    assert start().close() == []
    assert sorted(files(target)) == sorted([*NAMES, *foreign])


# What can go wrong.


def test_a_full_target_keeps_what_it_has_and_gets_the_rest_when_there_is_room(
    tmp_path, drive, start, said
):
    run, target = tmp_path / "small run", drive / "run"
    put(run, weight=b"b" * 100_000, checkpoint=newest(1, 300_000))
    one = start(run, target)
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    put(run, checkpoint=newest(2, 900_000))
    one.request()
    eventually(lambda: said, "no word of the full disk")
    time.sleep(0.3)  # several attempts
    assert said == [
        f"backup to {target}: No space left on device; training goes on, the run is whole in "
        f"{run}; trying again"
    ]
    assert holds(target / "checkpoint.pkl", newest(1, 300_000))
    put(run, checkpoint=newest(3, 400_000))
    one.request()
    eventually(lambda: len(said) == 2, "did not recover")
    assert said[1] == f"backup to {target}: works again"
    assert one.close() == []
    assert sorted(files(target)) == ["checkpoint.pkl", "checkpoint.previous.pkl", "weight.pkl"]
    assert (target / "checkpoint.pkl").read_bytes() == newest(3, 400_000)
    assert (target / "checkpoint.previous.pkl").read_bytes() == newest(1, 300_000)


def test_at_the_end_it_says_what_is_missing_and_where_it_is(run, target):
    put(run, weight=b"b" * 200_000)
    script = f"""
from pathlib import Path
from mshnet.training.backup import Backup
print(Backup(Path({str(run)!r}), Path({str(target)!r})).close())
"""

    def no_file_above_100_kb():  # the kernel refuses the write, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        preexec_fn=no_file_above_100_kb,
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-2:] == [
        f"backup: not in {target}: checkpoint.pkl, weight.pkl (File too large); they are in {run}",
        "['checkpoint.pkl', 'weight.pkl']",
    ], "a checkpoint would speak of a best that is not there"
    assert sorted(files(target)) == sorted(SMALL), "without leftovers"


def test_a_read_only_target(run, drive, start, said):
    target = drive / "run"
    one = start(target=target)
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    before = files(target)
    assert mount("-o", "remount,ro", drive)
    put(run, weight=b"best 2")
    assert one.close() == ["weight.pkl"]
    assert files(target) == before
    assert said[-1] == (
        f"backup: not in {target}: weight.pkl (Read-only file system); they are in {run}"
    )


def test_an_unmounted_target_is_not_made_anew_on_the_local_disk(run, drive, start, said):
    target = drive / "run"
    one = start(target=target)
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    subprocess.run(["umount", str(drive)], check=True)
    put(run, checkpoint=newest(2))
    one.request()
    eventually(lambda: said, "no word of the unmounted target")
    assert f"{drive} is not mounted any more" in said[0]
    assert list(drive.iterdir()) == []
    assert mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", drive)
    eventually(lambda: len(said) == 2, "did not recover")
    assert said[1].endswith("works again")
    assert sorted(files(target)) == sorted(NAMES), "another, empty, file system: everything anew"

    subprocess.run(["umount", str(drive)], check=True)
    assert one.close() == sorted(NAMES)
    assert list(drive.iterdir()) == []


def test_a_mount_point_that_has_become_a_plain_folder_stays_empty(
    run, tmp_path, target, start, said, monkeypatch
):
    """The same where mounting is not permitted: the table of mounts says so."""
    drive, table = tmp_path / "drive", {"mounted": True}
    look = backup.mount_of

    def with_drive(path, mounts=None):
        mounted = table["mounted"] and path.is_relative_to(drive)
        return (drive, "fuse.drive") if mounted else look(path, mounts)

    monkeypatch.setattr(backup, "mount_of", with_drive)
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    table["mounted"] = False
    shutil.rmtree(drive / "MyDrive")
    one.request()
    eventually(lambda: said, "no word of the unmounted target")
    assert f"{drive} is not mounted any more" in said[0]
    assert one.close() == sorted(NAMES)
    assert list(drive.iterdir()) == []


def test_a_target_folder_that_vanishes_is_made_and_filled_again(run, target, start, said, placed):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")

    shutil.rmtree(target)
    put(run, weight=b"best 2")
    one.request()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    placed.before["weight.pkl"] = lambda: shutil.rmtree(target)  # in the middle of a pass, too
    put(run, weight=b"best 3", checkpoint=newest(3))
    one.request()
    eventually(lambda: holds(target / "checkpoint.pkl", newest(3)), "nothing was copied")
    assert one.close() == []
    assert {name: (run / name).read_bytes() for name in NAMES} == files(target)


def test_a_file_deleted_in_the_target_comes_back_or_is_missed(target, start, said, monkeypatch):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    (target / "weight.pkl").unlink()
    one.request()
    eventually(lambda: (target / "weight.pkl").exists(), "did not come back")
    os.truncate(target / "weight.pkl", 17)  # damaged is as good as deleted
    one.request()
    eventually(lambda: (target / "weight.pkl").stat().st_size > 17, "did not come back")
    (target / "weight.pkl").unlink()
    monkeypatch.setattr(os, "fsync", lambda file: os.ftruncate(file, 0))
    assert one.close() == ["weight.pkl"], "it had arrived, but is not there"


def test_all_is_missed_if_the_target_folder_vanishes_for_good(target, start, said):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    shutil.rmtree(target.parent)
    target.parent.write_text("in its place")
    assert one.close() == sorted(NAMES)
    assert "(Not a directory)" in said[-1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.ftruncate(file, os.fstat(file).st_size - 1),
        lambda file: os.pwrite(file, b"\xff", 10),
    ],
    ids=["truncated", "altered"],
)
def test_a_copy_that_reads_differently_does_not_replace_the_old_one(
    damage, run, target, start, said, monkeypatch
):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    before = files(target)
    monkeypatch.setattr(os, "fsync", damage)  # what a mount may do with what it was given
    put(run, checkpoint=newest(2))
    one.request()
    eventually(lambda: said, "nobody noticed")
    assert "the copy of checkpoint.pkl reads differently from what was written" in said[0]
    eventually(lambda: files(target) == before, "the old copy was harmed, or half a file is left")
    monkeypatch.undo()
    eventually(lambda: len(said) == 2, "did not recover")
    assert one.close() == []
    assert (target / "checkpoint.pkl").read_bytes() == newest(2)


def test_a_target_that_cannot_be_made_at_the_start_is_tried_again(tmp_path, start, said):
    obstacle = tmp_path / "file"
    obstacle.write_text("where a folder should be")
    target = obstacle / "run"
    one = start(target=target)
    eventually(lambda: said, "no warning")
    time.sleep(0.3)  # several attempts
    assert len(said) == 1 and said[0].startswith(f"backup to {target}: Not a directory; ")
    obstacle.unlink()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "not tried again")
    assert one.close() == []


def test_a_run_is_not_backed_up_onto_itself(run, start, said):
    before = {path.name: path.stat().st_ino for path in run.iterdir()}
    one = start(target=run.parent / "run")
    assert one.close() == sorted(NAMES)
    assert "(it is the run's own folder)" in said[-1]
    assert before.keys() == {path.name for path in run.iterdir()}
    assert before["checkpoint.pkl"] == (run / "checkpoint.pkl").stat().st_ino


# A slow target.


def test_requests_during_a_copy_return_at_once_and_make_one_more_copy(
    run, start, placed, monkeypatch
):
    began, go_on = threading.Event(), threading.Event()
    passes, one_pass = [], Backup._pass
    monkeypatch.setattr(Backup, "_pass", lambda self: (passes.append(1), one_pass(self)))

    def wait():
        began.set()
        assert go_on.wait(60)

    placed.before["config.json"] = wait
    one = start()
    assert began.wait(60)
    for number in range(5):
        put(run, weight=b"best %d" % number, checkpoint=newest(number))
        one.request()  # would wait without end if it waited for the copy
    assert placed.names == ["config.json"]
    go_on.set()
    eventually(lambda: len(passes) == 2, "the requests were forgotten")
    assert one.close() == []
    assert len(passes) <= 3, "the last one is that of close()"
    # The first pass opened its checkpoint before the requests, and its best after them.
    assert placed.names == [*SMALL, "weight.pkl", "checkpoint.pkl", "checkpoint.pkl"]


def test_a_target_that_hangs_keeps_neither_close_nor_the_process(run, target):
    script = f"""
import os, time
from pathlib import Path
from mshnet.training import backup
backup.SOON = 0.5
target = Path({str(target)!r})
one = backup.Backup(Path({str(run)!r}), target)
while not (target / "checkpoint.pkl").exists():
    time.sleep(0.01)
os.mkfifo(target / f".weight.pkl.{{os.getpid()}}.part")  # opening it for writing blocks
Path({str(run / "weight.pkl")!r}).write_bytes(b"best 2")
one.request()
print(one.close(patience=1.5))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        f"backup to {target}: copying, for 1 s more at most",
        f"backup: not in {target}: weight.pkl (not done after 2 s); they are in {run}",
        "['weight.pkl']",
    ]


# Back again.


def test_a_backup_restored_is_the_run(run, target, start, tmp_path):
    one = start()
    eventually(lambda: (target / "checkpoint.pkl").exists(), "nothing was copied")
    put(run, checkpoint=newest(2))
    one.close()
    (target / ".weight.pkl.12.part").write_bytes(b"half")
    fresh = tmp_path / "new machine" / "run"
    names = restore(target, fresh)
    assert sorted(names) == sorted([*NAMES, "checkpoint.previous.pkl"])
    assert names[-1] == "checkpoint.pkl", "its presence means that all is there"
    assert files(fresh) == {name: (target / name).read_bytes() for name in names}


def test_restore_overwrites_nothing_and_goes_on_where_it_was_interrupted(
    run, target, start, tmp_path, monkeypatch
):
    start().close()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "config.json").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os.ftruncate(file, min(os.fstat(file).st_size, 99)))
        with pytest.raises(OSError, match=r"copy of weight\.pkl reads"):
            restore(target, fresh)
    assert sorted(files(fresh)) == sorted(SMALL), "what was whole, and no leftovers"
    assert restore(target, fresh) == ["weight.pkl", "checkpoint.pkl"]
    assert (fresh / "config.json").read_text() == "mine"


def test_a_source_that_ends_too_early_is_not_taken_for_the_whole(run, tmp_path):
    class Short(io.FileIO):  # a mount that breaks off, and does not say so
        def read(self, size=-1):
            return super().read(100) if self.tell() == 0 else b""

    with Short(run / "weight.pkl") as source, pytest.raises(OSError, match="in part only"):
        backup._place(source, tmp_path / "weight.pkl")
    assert not list(tmp_path.glob("*weight*"))


def test_restore_says_that_there_is_no_backup(tmp_path):
    with pytest.raises(FileNotFoundError):
        restore(tmp_path / "nowhere", tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


# Mounts.

COLAB = """\
overlay / overlay rw,relatime,lowerdir=/var/lib/docker/overlay2/l/A 0 0
proc /proc proc rw,nosuid,nodev,noexec,relatime 0 0
tmpfs /dev/shm tmpfs rw,size=6291456k 0 0
/dev/sda1 /etc/hosts ext4 rw,relatime 0 0
drive /content/drive fuse.drive rw,nosuid,nodev,relatime,user_id=0,group_id=0 0 0
tmpfs /content/drive/local\\040disk tmpfs rw 0 0
server:/home /home/me/my\\040nfs nfs4 rw 0 0
/dev/sdd1 /home ext4 rw 0 0
//server/share /mnt/share cifs rw 0 0
//server/old /mnt/old smbfs rw 0 0
/kaggle /kaggle/input 9p ro 0 0
/dev/sdb1 /kaggle/working ext4 rw 0 0
bucket /mnt/covered fuse.gcsfuse rw 0 0
/dev/sdc1 /mnt/covered ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/content/drive", True),
        ("/content/drive/MyDrive/runs/one", True),
        ("/content/drives", False),
        ("/content/weight", False),
        ("/content/drive/local disk/run", False),
        ("/home/me/my nfs/run", True),
        ("/home/me/my", False),
        ("/mnt/share/run", True),
        ("/mnt/old", True),
        ("/kaggle/input/data", False),
        ("/kaggle/working/weight", False),
        ("/dev/shm/run", False),
        ("/mnt/covered/run", False),
    ],
)
def test_the_deepest_mount_decides_whether_a_path_is_remote(path, remote):
    assert is_remote(Path(path), COLAB) is remote


def test_a_root_file_system_is_never_remote():
    assert not is_remote(Path("/home/run"), "fuse-overlayfs / fuse.fuse-overlayfs rw 0 0\n")
    assert not is_remote(Path("/home/run"), "")


def test_a_link_to_drive_is_remote(tmp_path):
    (tmp_path / "link").symlink_to("/content/drive/MyDrive")
    assert is_remote(tmp_path / "link" / "run", COLAB)


def test_without_a_table_of_mounts_only_the_place_of_drive_is_remote(tmp_path, monkeypatch):
    def no_proc(self, *arguments, **kwargs):
        raise FileNotFoundError(2, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert is_remote(Path("/content/drive/MyDrive/run"))
    assert not is_remote(tmp_path)
    assert os.path.ismount(backup.mount_of(tmp_path)[0])


def test_the_table_of_this_machine_is_read(tmp_path, drive):
    assert backup.mount_of(tmp_path)[0] != drive
    assert backup.mount_of(drive / "not yet" / "there") == (drive, "tmpfs")
