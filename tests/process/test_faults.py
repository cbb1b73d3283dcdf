"""Runs that end in the middle: killed, stopped, out of disk, without their Drive. Real faults."""

import contextlib
import fcntl
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import termios
import time
import zipfile
from pathlib import Path

import pytest
import torch

from mshnet import RequestError
from mshnet.data.scenes import write_scenes
from mshnet.training import checkpoint
from tpuscope.engine import torch_xla as runtime

_spec = importlib.util.spec_from_file_location("small", Path(__file__).with_name("small.py"))
small = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small)

# More of both for a thorough look: MSHNET_KILLS=20 MSHNET_XLA_KILLS=5
KILLS = int(os.environ.get("MSHNET_KILLS", 3))
XLA_KILLS = int(os.environ.get("MSHNET_XLA_KILLS", 1))
A_MOMENT = 1e-6  # minutes: a checkpoint after every step


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "scenes"
    return str(write_scenes(folder, train=36, test=10, size=32, progress=False))


@pytest.fixture(scope="module")
def given(scenes):
    return {"dataset_dir": scenes, "device": "cpu"}


def log(folder):
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(folder):
    """What must not depend on interruptions; seconds may."""
    names = ("epoch", "loss", "iou", "niou", "pd", "fa", "weights")
    return [tuple(record[name] for name in names) for record in log(folder)]


def assert_same_weights(folder, other):
    for name, key in (("weight.pkl", "state_dict"), ("checkpoint.pkl", "net")):
        ours, theirs = (torch.load(Path(f) / name, weights_only=True) for f in (folder, other))
        assert ours["epoch"] == theirs["epoch"]
        for parameter, value in ours[key].items():
            assert torch.equal(value, theirs[key][parameter]), (name, parameter)
    ours, theirs = (
        torch.load(Path(f) / "checkpoint.pkl", weights_only=True)["optimizer"]["state"]
        for f in (folder, other)
    )
    for parameter, slots in ours.items():
        assert all(torch.equal(slots[k], theirs[parameter][k]) for k in slots)


# --- killed --------------------------------------------------------------------------------------


def steps_saved(folder, of_an_epoch=4):
    """Steps behind the newest whole checkpoint of a run; 4 are 36 images in batches of 8."""
    epochs, steps = checkpoint.position(checkpoint.newest([Path(folder)])[1])
    return of_an_epoch * epochs + steps


def killed_again_and_again(given, kills):
    """Kill -9 at a random moment of training, resume, until it has been killed often enough.

    Returns:
        The steps that the checkpoint had behind it each time.
    """
    chance = random.Random(0)
    left = []
    for _ in range(kills):
        begin = steps_saved(given["save_dir"])
        process = small.start(given, "auto", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        more = chance.randint(1, 6)
        while process.poll() is None and steps_saved(given["save_dir"]) < begin + more:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.1))  # in a step, in a write, in a test
        process.kill()
        process.wait()
        left.append(steps_saved(given["save_dir"]))
    done = small.start(given, "auto", stderr=subprocess.PIPE)
    _, errors = done.communicate()
    assert done.returncode == 0, errors
    return left


def assert_kills_change_nothing(given, folder, kills):
    given = given | {"epochs": 4 + 3 * kills, "save_minutes": A_MOMENT}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole = small.start(given | {"save_dir": str(folder / "whole")}, **quiet)
    killed = str(folder / "killed")
    left = killed_again_and_again(given | {"save_dir": killed}, kills)
    assert whole.wait() == 0
    print(f"{kills} kills left a checkpoint after {left} steps, {4 * given['epochs']} in all")
    assert 0 < left[-1] < 4 * given["epochs"], "the kills were in the middle of training"
    assert numbers(killed) == numbers(folder / "whole")
    assert_same_weights(killed, folder / "whole")


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(given, tmp_path):
    assert_kills_change_nothing(given, tmp_path, KILLS)


@pytest.mark.skipif(not runtime.installed(), reason="torch_xla is not installed on this system")
def test_the_same_on_xla(scenes, tmp_path):
    assert_kills_change_nothing({"dataset_dir": scenes, "device": "tpu"}, tmp_path, XLA_KILLS)


# --- stopped -------------------------------------------------------------------------------------


def begun(folder, process, epochs=1, meanwhile=lambda: None):
    """Wait until some epochs are in the log."""
    deadline = time.monotonic() + 240
    while len(log(folder)) < epochs:
        assert process.poll() is None and time.monotonic() < deadline, "it did not begin"
        meanwhile()
        time.sleep(0.02)


def assert_stopped_and_resumable(folder, code, number):
    assert code == 128 + number
    state = torch.load(folder / "checkpoint.pkl", weights_only=True)
    epochs, steps = state["epoch"] + 1, state.get("step", 0)
    assert 1 <= epochs < 400 and 0 <= steps <= 4
    assert (folder / "curves.png").exists()
    resumed = small.train({"epochs": epochs + 1}, str(folder))
    position = f"epoch {epochs}" + (f" and {steps} steps" if steps else "")
    assert f"resuming {folder} after {position}, from" in resumed
    done = torch.load(folder / "checkpoint.pkl", weights_only=True)
    updates = done["optimizer"]["state"][0]["step"].item()
    assert updates == 4 * (epochs + 1), "every step once"


def test_a_signal_saves_and_stops_and_nothing_is_repeated(given, tmp_path):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    runs = {number: tmp_path / number.name for number in numbers}
    processes = {n: small.start(given | {"epochs": 400, "save_dir": str(runs[n])}) for n in runs}
    for number, folder in runs.items():
        begun(folder, processes[number])
        processes[number].send_signal(number)
    for number, folder in runs.items():
        printed, _ = processes[number].communicate(timeout=60)
        assert f"{number.name}: saving, then stopping" in printed
        assert f"stopped by {number.name}" in printed and f"--resume {folder}" in printed
        assert_stopped_and_resumable(folder, processes[number].returncode, number)


def test_a_closed_terminal_saves_and_stops(given, tmp_path):
    """Its SIGHUP comes with a terminal that refuses what is written to it, and comes twice."""
    master, terminal = os.openpty()
    os.set_blocking(master, False)

    def take_the_terminal():
        os.setsid()
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)

    def read():  # or the terminal fills up, and the process waits
        with contextlib.suppress(BlockingIOError):
            os.read(master, 65536)

    process = small.start(
        given | {"epochs": 400, "save_dir": str(tmp_path / "run")},
        stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=take_the_terminal,
    )  # fmt: skip
    os.close(terminal)
    begun(tmp_path / "run", process, meanwhile=read)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert_stopped_and_resumable(tmp_path / "run", process.wait(timeout=60), signal.SIGHUP)


def test_a_session_with_a_limit_ends_in_order(given, tmp_path):
    folder = str(tmp_path / "run")
    # Ten seconds are kept for saving.
    printed = small.train(given | {"epochs": 4000, "max_minutes": 0.2, "save_dir": folder})
    assert "stopped by --max-minutes 0.2" in printed
    state = torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)
    assert state["config"]["max_minutes"] == 0.2
    assert "stopped by" not in small.train({"epochs": state["epoch"] + 2}, folder), "its own limit"


# --- damaged -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(given, tmp_path_factory):
    """A run of three epochs; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    small.train(given | {"epochs": 3, "save_dir": str(folder)})
    return folder


@pytest.fixture
def run(finished, given, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    """Flip a bit of the largest tensor; one between the members would change no number."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        numbers = archive.read(largest)
    content = bytearray(path.read_bytes())
    content[content.index(numbers) + len(numbers) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_newest_checkpoint_is_passed_over(given, run, finished, damage):
    newest = run / "checkpoint.pkl"
    damage(newest)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')  # a line cut short by a kill
    resumed = small.train({"dataset_dir": given["dataset_dir"]}, str(run))
    assert f"{newest} is damaged or incomplete, and is passed over" in resumed
    assert "after epoch 2, from" in resumed and "previous.pkl" in resumed
    assert numbers(run) == numbers(finished)
    assert_same_weights(run, finished)
    previous = torch.load(run / "checkpoint.previous.pkl", weights_only=True)
    assert previous["epoch"] == 1, "the damaged one did not take the place of the whole one"


def test_a_log_of_foreign_lines_stops_neither_training_nor_its_picture(given, run):
    (run / "metrics.jsonl").write_text('{"epoch": 0}\n{"loss": 1}\n3\n{"epoch": 1, "loss": "x"}\n')
    (run / "curves.png").unlink()
    small.train({"dataset_dir": given["dataset_dir"], "epochs": 4}, str(run))
    assert [record["epoch"] for record in log(run)] == [3]
    assert (run / "curves.png").exists()


def test_a_checkpoint_further_than_the_data_set_is_refused(given, run):
    path = run / "checkpoint.pkl"
    torch.save(torch.load(path, weights_only=True) | {"step": 99}, path)
    with pytest.raises(RequestError) as error:
        small.train({"dataset_dir": given["dataset_dir"], "epochs": 5}, str(path))
    assert (error.value.code, "99" in str(error.value)) == ("other-data", True)


# --- other runs ----------------------------------------------------------------------------------


def test_a_new_run_leaves_the_backup_of_another_run_alone(given, tmp_path):
    drive = tmp_path / "drive"
    small.train(given | {"epochs": 2, "save_dir": str(tmp_path / "A"), "backup": str(drive)})
    shutil.rmtree(tmp_path / "A")
    before = {path.name: path.read_bytes() for path in drive.iterdir()}
    again = given | {"epochs": 1, "save_dir": str(tmp_path / "B"), "backup": str(drive)}
    with pytest.raises(RequestError) as error:
        small.train(again)
    assert error.value.code == "earlier-run"
    assert "--resume auto" in str(error.value) and "another folder" in str(error.value)
    assert {path.name: path.read_bytes() for path in drive.iterdir()} == before
    assert not (tmp_path / "B").exists()


def test_two_runs_do_not_share_a_folder_and_a_killed_one_holds_none(given, tmp_path):
    """Its loader process outlives it for some seconds, and may not keep the lock."""
    given = given | {"epochs": 400, "workers": 1, "save_dir": str(tmp_path / "run")}
    first, second = (small.start(given, "auto", stderr=subprocess.PIPE) for _ in range(2))
    while first.poll() is None and second.poll() is None:
        time.sleep(0.02)
    if first.poll() is not None:
        first, second = second, first
    _, errors = second.communicate()
    assert second.returncode == 2
    assert str(tmp_path / "run") in errors and len(errors.splitlines()) == 1
    begun(tmp_path / "run", first, epochs=2)
    assert [record["epoch"] for record in log(tmp_path / "run")][:2] == [0, 1]
    first.kill()
    first.wait()
    reached = len(log(tmp_path / "run"))
    small.train(given | {"epochs": reached + 1, "workers": 0}, "auto")
    assert [record["epoch"] for record in log(tmp_path / "run")] == list(range(reached + 1))
    first.communicate()


# --- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own: 2 MB, mounted for the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root; the other disk tests need none")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_checkpoint(given, disk):
    run = disk / "run"
    with pytest.raises(RequestError) as error:
        small.train(given | {"save_dir": str(run), "epochs": 1})
    assert error.value.code == "disk-full"
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    process = small.start(given | {"save_dir": str(run), "epochs": 500}, stderr=subprocess.PIPE)
    begun(run, process, epochs=2)
    with open(disk / "filler", "wb") as file, contextlib.suppress(OSError):
        while True:  # somebody else fills the disk
            file.write(bytes(4096))
            file.flush()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert ("Traceback" not in errors and "could not be written" in errors) or "No space" in errors
    assert not list(run.glob(".*.part"))
    (disk / "filler").unlink()
    reached = torch.load(run / "checkpoint.pkl", weights_only=True)["epoch"] + 1
    assert reached >= 1
    small.train({"epochs": reached + 1}, str(run))
    assert [record["epoch"] for record in log(run)] == list(range(reached + 1))


def test_a_file_that_the_kernel_refuses_leaves_the_checkpoint_as_it_was(given, run):
    before = (run / "checkpoint.pkl").read_bytes()
    resumed = {"dataset_dir": given["dataset_dir"], "epochs": 4}

    def no_file_above_50_kb():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    failed = small.start(resumed, str(run), stderr=subprocess.PIPE, preexec_fn=no_file_above_50_kb)
    _, errors = failed.communicate()
    assert failed.returncode == 1
    assert "pkl could not be written: File too large" in errors
    assert f"go on with --resume {run}" in errors
    assert (run / "checkpoint.pkl").read_bytes() == before
    small.train(resumed, str(run))
    assert [record["epoch"] for record in log(run)] == [0, 1, 2, 3]


# --- Drive ---------------------------------------------------------------------------------------


def test_a_drive_that_is_removed_stops_nothing_and_gets_everything_again(given, tmp_path):
    folder, drive = tmp_path / "run", tmp_path / "drive"
    given = given | {"epochs": 12, "backup": str(drive / "run"), "save_dir": str(folder)}
    process = small.start(given)
    begun(folder, process)
    while not (drive / "run" / "checkpoint.pkl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    shutil.rmtree(drive, ignore_errors=True)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert f"backup: complete in {drive / 'run'}" in printed
    assert len(log(folder)) == 12
    for name in ("weight.pkl", "checkpoint.pkl", "metrics.jsonl", "curves.png"):
        assert (drive / "run" / name).read_bytes() == (folder / name).read_bytes()


def test_a_read_only_drive_is_reported_and_the_run_is_whole(given, disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    given = given | {"epochs": 2, "backup": str(disk / "run"), "save_dir": str(tmp_path / "run")}
    printed = small.train(given)
    assert "Read-only file system; training goes on" in printed
    assert f"backup: not in {disk / 'run'}" in printed
    assert f"they are in {tmp_path / 'run'}" in printed
    assert len(log(tmp_path / "run")) == 2


def test_a_new_machine_goes_on_from_the_backup_alone(given, finished, tmp_path):
    folder, drive = tmp_path / "run", tmp_path / "drive" / "run"
    given = given | {"save_dir": str(folder), "backup": str(drive)}
    printed = small.train(given | {"epochs": 2}, "auto")
    assert "no checkpoint in" in printed and "a new run begins" in printed
    shutil.rmtree(folder)  # the machine is gone
    printed = small.train(given | {"epochs": 3}, "auto")
    assert f"from {drive / 'checkpoint.pkl'}" in printed
    assert numbers(folder) == numbers(finished)
    assert_same_weights(folder, finished)
    assert (drive / "weight.pkl").read_bytes() == (folder / "weight.pkl").read_bytes()


def _group(number):
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == number and state != "Z":
                found.append(path.parent.name)
    return found


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.skipif(not runtime.installed(), reason="torch_xla is not installed on this system")
def test_a_replica_that_fails_ends_the_whole_run(scenes, tmp_path):
    """A data set that is deleted while a run trains on it."""
    data = tmp_path / "data"
    shutil.copytree(scenes, data)
    given = {"dataset_dir": str(data), "device": "tpu", "num_cores": 2, "strategy": "launch"}
    given |= {"epochs": 50, "cache": "none", "save_dir": str(tmp_path / "run")}
    process = small.start(given, stderr=subprocess.PIPE, start_new_session=True)
    begun(tmp_path / "run", process)
    shutil.rmtree(data / "images")
    failed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    print(f"{time.monotonic() - failed:.1f} s from the fault to the end of all processes")
    assert process.returncode == 1
    assert errors.count("tpuscope.errors.RequestError") == 1, (
        "one replica's, and its cause above it"
    )
    assert "images" in errors.splitlines()[-1]
    deadline = time.monotonic() + 60 - (time.monotonic() - failed)
    while _group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group(process.pid), "all processes are gone within a minute"
    assert torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)["epoch"] >= 0
