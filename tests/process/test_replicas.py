"""Replicas without a TPU: real processes that reduce, fail, are killed, and are asked to stop."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tpuscope.engine import replicas as launching
from tpuscope.engine.replicas import ReplicaFailed

# Replicas import this file, by its name from the project's folder.


def launch(function, *args, replicas=2, **kwargs):
    return launching.launch(function, args, replicas, "CPU", **kwargs)


def alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def write_pid(folder, replicas):
    (Path(folder) / str(replicas.ordinal)).write_text(str(os.getpid()))


def pids(folder, count):
    """The replicas' processes, once all have begun."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in Path(folder).iterdir() if path.name.isdigit()]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the replicas did not begin")


# --- reducing ------------------------------------------------------------------------------------


def reduce_everything(replicas, precise):
    """Every operation once, on the device; replica 0's view of the results."""
    from tpuscope.engine import torch_xla as runtime

    device, n = runtime.device(), replicas.ordinal
    weight = torch.nn.Parameter(torch.full((2, 3), 1.0 + n).to(device))
    unused = torch.nn.Parameter(torch.ones(4).to(device))
    replicas.broadcast([weight])
    started = weight.detach().cpu()
    optimizer = torch.optim.SGD([weight, unused], lr=1.0)
    (weight * torch.full((2, 3), float(n)).to(device)).sum().backward()  # gradient n
    replicas.optimizer_step(optimizer)
    runtime.sync()
    return {
        "count": replicas.count,
        "started": replicas.gather(started.flatten()).tolist(),
        "stepped": replicas.gather(weight.detach().cpu().flatten()).tolist(),
        "unused": unused.grad is None,
        "precise": replicas.gather(torch.tensor([precise + n], dtype=torch.float64)).tolist(),
        "large": replicas.gather(torch.tensor([2**53 + n, -n])).tolist(),
    }


def test_replicas_broadcast_reduce_and_gather():
    precise = 1 / 3
    seen = launch(reduce_everything, precise, replicas=3)
    assert seen["count"] == 3
    assert seen["started"] == [[1.0] * 6] * 3, "replica 0's values"
    assert seen["stepped"] == [[0.0] * 6] * 3, "the mean of 0, 1 and 2 was subtracted"
    assert seen["unused"]
    assert seen["precise"] == [[precise + n] for n in range(3)], "every bit of a float64"
    assert seen["large"] == [[2**53 + n, -n] for n in range(3)]


# --- failing -------------------------------------------------------------------------------------


def fail_alone(replicas, folder):
    write_pid(folder, replicas)
    replicas.gather(torch.zeros(1))
    if replicas.ordinal == 1:
        raise ValueError("the third image is too green")
    replicas.gather(torch.zeros(1))  # waits for replica 1, which never comes


def test_one_that_raises_ends_all_and_is_the_one_that_is_heard(tmp_path):
    with pytest.raises(ReplicaFailed) as failed:
        launch(fail_alone, str(tmp_path), replicas=3)
    assert str(failed.value).count("Traceback") == 1
    assert str(failed.value).endswith("ValueError: the third image is too green")
    assert not any(alive(pid) for pid in pids(tmp_path, 3))


def wait_for_ever(replicas, folder):
    write_pid(folder, replicas)
    while True:
        time.sleep(0.1)


def test_one_that_is_killed_ends_all(tmp_path):
    def kill_one_when_all_have_begun():
        if len(list(tmp_path.iterdir())) == 2:
            with contextlib.suppress(ProcessLookupError):  # done already
                os.kill(pids(tmp_path, 2)[0], signal.SIGKILL)

    with pytest.raises(ReplicaFailed, match="signal 9 and without a traceback"):
        launch(wait_for_ever, str(tmp_path), stop_requested=kill_one_when_all_have_begun)
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


def start_another(others, target, *args):
    """A child process that is no replica, started while replicas work."""
    if not others:
        others.append(multiprocessing.get_context("spawn").Process(target=target, args=args))
        others[0].start()


def test_ending_the_replicas_ends_no_other_child(tmp_path):
    others = []
    with pytest.raises(ReplicaFailed, match="too green"):
        launch(
            fail_alone,
            str(tmp_path),
            stop_requested=lambda: start_another(others, time.sleep, 600),
        )
    assert others[0].is_alive()
    others[0].kill()
    others[0].join()


def test_another_child_that_fails_is_no_replica(tmp_path):
    others = []

    def asked():
        start_another(others, os._exit, 3)
        begun = len(list(tmp_path.iterdir())) == 2
        return "SIGTERM" if begun and others[0].exitcode == 3 else None

    assert launch(work_until_asked, str(tmp_path), stop_requested=asked) == "SIGTERM"


def test_replicas_do_not_outlive_a_killed_parent(tmp_path):
    code = (
        "from tests.process.test_replicas import *\n"
        f"if __name__ == '__main__': launch(wait_for_ever, {str(tmp_path)!r})"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, script], env=os.environ | {"PYTHONPATH": str(root)})
    replicas = pids(tmp_path, 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, replicas)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, replicas))


# --- stopping ------------------------------------------------------------------------------------


def work_until_asked(replicas, folder):
    write_pid(folder, replicas)
    while not replicas.stop_requested():
        time.sleep(0.05)
    return replicas.stop_requested()


def test_a_request_to_stop_reaches_every_replica(tmp_path):
    def asked():
        return "SIGTERM" if len(list(tmp_path.iterdir())) == 2 else None

    assert launch(work_until_asked, str(tmp_path), stop_requested=asked) == "SIGTERM"


def test_replicas_do_not_hear_the_terminals_ctrl_c(tmp_path):
    """It goes to every process of the terminal; the launching one decides what it means."""
    sent = []

    def asked():
        if not sent and len(list(tmp_path.iterdir())) == 2:
            sent.extend(pids(tmp_path, 2))
            for pid in sent:
                os.kill(pid, signal.SIGINT)
            return None
        return "SIGINT" if sent and all(map(alive, sent)) else None

    assert launch(work_until_asked, str(tmp_path), stop_requested=asked) == "SIGINT"


def test_ctrl_c_in_a_terminal_is_one_request(tmp_path):
    """A process of its own, with its replicas in its process group, as a shell starts it."""
    script = tmp_path / "parent.py"
    script.write_text(
        "from mshnet.training.preemption import signals\n"
        "from tests.process.test_replicas import *\n"
        "if __name__ == '__main__':\n"
        "    with signals() as stop_requested:\n"
        f"        print(launch(work_until_asked, {str(tmp_path)!r}, stop_requested=stop_requested))"
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids(tmp_path, 2)
    os.killpg(parent.pid, signal.SIGINT)
    printed, _ = parent.communicate(timeout=60)
    assert parent.returncode == 0
    assert printed.splitlines()[-1] == "SIGINT"


def test_what_the_request_raises_ends_all_at_once(tmp_path):
    def second_ctrl_c():
        if len(list(tmp_path.iterdir())) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(wait_for_ever, str(tmp_path), stop_requested=second_ctrl_c)
    assert not any(alive(pid) for pid in pids(tmp_path, 2))
