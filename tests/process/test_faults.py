"""Runs that end in the middle: killed, stopped, out of disk, without their Drive. Real faults."""

import contextlib
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
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


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "scenes"
    return str(write_scenes(folder, train=36, test=10, size=32, progress=False))


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


def steps_saved(folder):
    """Steps behind the newest whole checkpoint of a run."""
    try:
        epochs, steps = checkpoint.position(checkpoint.newest([Path(folder)])[1])
    except RequestError:  # it is being replaced at this moment
        return 0
    return 4 * epochs + steps  # 36 images in batches of 8


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
    done = small.run(given, "auto")
    assert done.returncode == 0, done.stderr
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


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(scenes, tmp_path):
    assert_kills_change_nothing({"dataset_dir": scenes, "device": "cpu"}, tmp_path, KILLS)


@pytest.mark.skipif(not runtime.installed(), reason="torch_xla is not installed on this system")
def test_the_same_on_xla(scenes, tmp_path):
    assert_kills_change_nothing({"dataset_dir": scenes, "device": "tpu"}, tmp_path, XLA_KILLS)


def test_a_line_of_the_log_cut_short_by_a_kill_is_dropped(scenes, tmp_path):
    given = {"dataset_dir": scenes, "device": "cpu", "save_dir": str(tmp_path / "run")}
    assert small.run(given | {"epochs": 1}).returncode == 0
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 1, "lo')
    assert small.run({"epochs": 2}, str(tmp_path / "run")).returncode == 0
    assert [record["epoch"] for record in log(tmp_path / "run")] == [0, 1]


# --- stopped -------------------------------------------------------------------------------------


def begun(folder, process, epochs=1):
    """Wait until some epochs are in the log."""
    deadline = time.monotonic() + 240
    while len(log(folder)) < epochs:
        assert process.poll() is None and time.monotonic() < deadline, "it did not begin"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_nothing_is_repeated(scenes, tmp_path, number):
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 40}
    folder = tmp_path / "run"
    process = small.start(given | {"save_dir": str(folder)})
    begun(folder, process)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert f"{name}: saving, then stopping" in printed
    assert f"stopped by {name}" in printed and f"go on with --resume {folder}" in printed
    state = torch.load(folder / "checkpoint.pkl", weights_only=True)
    epochs, steps = state["epoch"] + 1, state.get("step", 0)
    assert 1 <= epochs < 40 and 0 <= steps <= 4
    assert (folder / "curves.png").exists()
    resumed = small.run({"epochs": epochs + 1}, str(folder))
    position = f"epoch {epochs}" + (f" and {steps} steps" if steps else "")
    assert f"resuming {folder} after {position}, from" in resumed.stdout
    done = torch.load(folder / "checkpoint.pkl", weights_only=True)
    updates = done["optimizer"]["state"][0]["step"].item()
    assert updates == 4 * (epochs + 1), "every step once"


def test_a_session_with_a_limit_ends_in_time_and_in_order(scenes, tmp_path):
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 4000, "max_minutes": 0.35}
    started = time.monotonic()
    done = small.run(given | {"save_dir": str(tmp_path / "run")})
    assert done.returncode == 0
    assert "stopped by --max-minutes 0.35" in done.stdout
    assert time.monotonic() - started > 60 * 0.35 - 15, "it used its time"
    state = torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)
    assert state["config"]["max_minutes"] == 0.35
    resumed = small.run({"epochs": state["epoch"] + 2}, str(tmp_path / "run"))
    assert json.loads(resumed.stdout.splitlines()[-1])["stopped"] is None, "the limit was its own"


# --- damaged -------------------------------------------------------------------------------------


def test_a_truncated_newest_checkpoint_is_passed_over(scenes, tmp_path):
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 3}
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert small.run(given | {"save_dir": str(folder)}).returncode == 0
    shutil.copytree(folder, whole)
    newest = folder / "checkpoint.pkl"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    resumed = small.run({}, str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert f"{newest} is damaged or incomplete, and is passed over" in resumed.stdout
    assert "after epoch 2, from" in resumed.stdout and "previous.pkl" in resumed.stdout
    assert numbers(folder) == numbers(whole)
    assert_same_weights(folder, whole)
    previous = torch.load(folder / "checkpoint.previous.pkl", weights_only=True)
    assert previous["epoch"] == 1, "the damaged one did not take the place of the whole one"


def test_a_flipped_bit_is_noticed(scenes, tmp_path):
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 2}
    folder = tmp_path / "run"
    assert small.run(given | {"save_dir": str(folder)}).returncode == 0
    newest = folder / "checkpoint.pkl"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert "is damaged or incomplete, and is passed over" in small.run({}, str(folder)).stdout


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


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_checkpoint(scenes, disk):
    given = {"dataset_dir": scenes, "device": "cpu", "save_dir": str(disk / "run")}
    refused = small.run(given | {"epochs": 1})
    assert refused.returncode == 2 and "MB free, a run writes up to" in refused.stderr
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    assert small.run(given | {"epochs": 1}).returncode == 0
    before = (disk / "run" / "checkpoint.pkl").read_bytes()

    process = small.start({"epochs": 500}, str(disk / "run"), stderr=subprocess.PIPE)
    begun(disk / "run", process, epochs=3)  # the second one's checkpoint is there then
    with open(disk / "filler", "wb") as file, contextlib.suppress(OSError):
        while True:  # somebody else fills the disk
            file.write(bytes(4096))
            file.flush()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert ("Traceback" not in errors and "could not be written" in errors) or "No space" in errors
    assert not list((disk / "run").glob(".*.part"))
    (disk / "filler").unlink()
    reached = torch.load(disk / "run" / "checkpoint.pkl", weights_only=True)["epoch"] + 1
    assert (disk / "run" / "checkpoint.pkl").read_bytes() != before and reached >= 2
    assert small.run({"epochs": reached + 1}, str(disk / "run")).returncode == 0
    assert [record["epoch"] for record in log(disk / "run")] == list(range(reached + 1))


def test_a_file_that_the_kernel_refuses_leaves_the_checkpoint_as_it_was(scenes, tmp_path):
    given = {"dataset_dir": scenes, "device": "cpu", "save_dir": str(tmp_path / "run")}
    assert small.run(given | {"epochs": 1}).returncode == 0
    before = (tmp_path / "run" / "checkpoint.pkl").read_bytes()

    def no_file_above_50_kb():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    failed = small.run({"epochs": 2}, str(tmp_path / "run"), preexec_fn=no_file_above_50_kb)
    assert failed.returncode == 1
    assert "pkl could not be written: File too large" in failed.stderr
    assert f"go on with --resume {tmp_path / 'run'}" in failed.stderr
    assert (tmp_path / "run" / "checkpoint.pkl").read_bytes() == before
    assert small.run({"epochs": 2}, str(tmp_path / "run")).returncode == 0
    assert [record["epoch"] for record in log(tmp_path / "run")] == [0, 1]


# --- Drive ---------------------------------------------------------------------------------------


def test_a_drive_that_is_removed_stops_nothing_and_gets_everything_again(scenes, tmp_path):
    folder, drive = tmp_path / "run", tmp_path / "drive"
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 12, "backup": str(drive / "run")}
    process = small.start(given | {"save_dir": str(folder)})
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


def test_a_read_only_drive_is_said_and_the_run_is_whole(scenes, disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    given = {"dataset_dir": scenes, "device": "cpu", "epochs": 2, "backup": str(disk / "run")}
    done = small.run(given | {"save_dir": str(tmp_path / "run")})
    assert done.returncode == 0, done.stderr
    assert "Read-only file system; training goes on" in done.stdout
    assert f"backup: not in {disk / 'run'}" in done.stdout
    assert f"they are in {tmp_path / 'run'}" in done.stdout
    assert len(log(tmp_path / "run")) == 2


def test_a_new_machine_goes_on_from_the_backup_alone(scenes, tmp_path):
    folder, drive, whole = tmp_path / "run", tmp_path / "drive" / "run", tmp_path / "whole"
    given = {"dataset_dir": scenes, "device": "cpu"}
    undisturbed = small.start(
        given | {"epochs": 4, "save_dir": str(whole)}, stdout=subprocess.DEVNULL
    )
    given |= {"save_dir": str(folder), "backup": str(drive)}
    first = small.run(given | {"epochs": 2}, "auto")
    assert "no checkpoint in" in first.stdout and "a new run begins" in first.stdout
    shutil.rmtree(folder)  # the machine is gone
    second = small.run(given | {"epochs": 4}, "auto")
    assert second.returncode == 0, second.stderr
    assert f"from {drive / 'checkpoint.pkl'}" in second.stdout
    assert undisturbed.wait() == 0
    assert numbers(folder) == numbers(whole)
    assert_same_weights(folder, whole)
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
def test_a_replica_that_fails_ends_the_whole_training(scenes, tmp_path):
    """A data set that is deleted under a running training."""
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
