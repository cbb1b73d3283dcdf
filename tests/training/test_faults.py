"""Runs that end in the middle: killed, and out of disk. Real processes, real faults."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import torch

SMALL = "--base-size 32 --crop-size 32 --batch-size 2 --workers 0 --device cpu --warm-epoch 0"


# Beside other work, two threads that wait for each other are slower than one.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(arguments, **kwargs):
    return subprocess.run(arguments, capture_output=True, text=True, env=ENVIRONMENT, **kwargs)


def command(data, epochs, *extra):
    flags = SMALL.split() if "--resume" not in extra else []
    where = [] if "--resume" in extra else ["--dataset-dir", str(data)]
    return [
        sys.executable, "-m", "mshnet", "train", *where, *flags, "--epochs", str(epochs), *extra
    ]  # fmt: skip


def log(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(records):
    """What must not depend on interruptions; seconds may."""
    return [(r["epoch"], r["loss"], r["iou"], r["niou"], r["pd"], r["fa"]) for r in records]


def test_a_killed_run_resumes_to_the_numbers_of_one_never_killed(tiny_dataset, tmp_path):
    data = tiny_dataset(train=6)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(command(data, 4, "--save-dir", str(whole)), check=True)

    process = subprocess.Popen(
        command(data, 4, "--save-dir", str(killed)), stdout=subprocess.DEVNULL, env=ENVIRONMENT
    )
    deadline = time.monotonic() + 240
    while len(log(killed)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(log(killed)) < 4, "killed in the middle"
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')  # the line that the kill cut short

    resumed = run(command(data, 4, "--resume", str(killed)), check=True)
    assert f"resuming {killed} after epoch" in resumed.stdout
    assert numbers(log(killed)) == numbers(log(whole))
    ours, theirs = (torch.load(f / "weight.pkl", weights_only=True) for f in (whole, killed))
    assert ours["epoch"] == theirs["epoch"]
    for key, value in ours["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][key]), key


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_checkpoint(tiny_dataset, tmp_path):
    data, folder = tiny_dataset(), tmp_path / "run"
    run(command(data, 1, "--save-dir", str(folder)), check=True)
    before = (folder / "checkpoint.pkl").read_bytes()

    def no_file_above_1_mb():  # the kernel refuses the write, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    failed = run(command(data, 2, "--resume", str(folder)), preexec_fn=no_file_above_1_mb)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "weight.pkl" in failed.stderr or "checkpoint.pkl" in failed.stderr
    assert (folder / "checkpoint.pkl").read_bytes() == before
    assert not list(folder.glob(".*.part"))
    run(command(data, 2, "--resume", str(folder)), check=True)
    assert [r["epoch"] for r in log(folder)] == [0, 1]
