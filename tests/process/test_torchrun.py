"""Training over processes and machines, as torchrun starts them: the numbers of one process.

Two machines are two torchrun commands that meet on the loopback interface.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mshnet.data.scenes import write_scenes
from tests.process import small
from tests.process.test_faults import A_MOMENT, assert_same_weights, log, numbers, steps_saved

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests" / "process" / "small.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun") / "scenes"
    return str(write_scenes(folder, train=20, test=5, size=32, progress=False))


@pytest.fixture(scope="module")
def given(scenes):
    return {"dataset_dir": scenes, "device": "cpu", "epochs": 2}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory):
    """One thread a process, and a disk cache that goes with the tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextlib.contextmanager
def torchrun(*command, processes=2, machines=1, flags=()):
    """Run a script; yields one torchrun process a machine, and ends what is left of them."""
    port = str(free_port())
    where = ["--nnodes", str(machines), "--nproc-per-node", str(processes)]
    where += ["--master-addr", "127.0.0.1", "--master-port", port]
    agents = [
        subprocess.Popen(
            [*TORCHRUN, *where, "--node-rank", str(node), *flags, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(machines)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                for pid in workers(agent).values():
                    os.kill(pid, signal.SIGKILL)
                agent.kill()
                agent.wait()


def train(overrides, resume=None, **kwargs):
    return torchrun(SMALL, json.dumps(small.request(overrides, resume)), **kwargs)


def finished(agents):
    """Wait for them; standard output and error of all machines."""
    results = [agent.communicate(timeout=240) for agent in agents]
    for agent, (_, errors) in zip(agents, results, strict=True):
        assert agent.returncode == 0, errors
    return "".join(out for out, _ in results), "".join(err for _, err in results)


def workers(agent):
    """Processes that a torchrun process has started: rank → process number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent.pid:
                variables = (folder / "environ").read_bytes().split(b"\0")
                ranks = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
                found.update({int(rank): int(folder.name) for rank in ranks})
    return found


# --- the numbers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory):
    """Return the folder of a run of one process, by type and space-to-depth factor."""
    made = {}

    def run(dtype, factor):
        if (dtype, factor) not in made:
            folder = tmp_path_factory.mktemp("alone") / "run"
            overrides = given | {"save_dir": str(folder), "space_to_depth": factor}
            process = small.start(overrides, env={"SMALL_DTYPE": dtype})
            printed, _ = process.communicate(timeout=240)
            assert process.returncode == 0, printed
            made[dtype, factor] = folder
        return made[dtype, factor]

    return run


def assert_close(folder, other, tolerance):
    """Weights, running statistics, Adagrad's sums and the log agree."""
    ours, theirs = (
        torch.load(Path(f) / "checkpoint.pkl", weights_only=True) for f in (folder, other)
    )
    for name, value in ours["net"].items():
        torch.testing.assert_close(
            value, theirs["net"][name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )
    for number, slots in ours["optimizer"]["state"].items():
        expected = theirs["optimizer"]["state"][number]
        for slot, value in slots.items():
            torch.testing.assert_close(value, expected[slot], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(log(folder), log(other), strict=True):
        for name in ("loss", "iou", "niou", "fa", "fa_official"):
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name


def test_two_processes_have_the_numbers_of_one(given, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALL_DTYPE", "float64")
    with train(given | {"save_dir": str(tmp_path / "run"), "space_to_depth": 0}) as agents:
        printed, _ = finished(agents)
    assert "device: cpu: 2 processes on 1 machine, fp32" in printed
    assert printed.count("epoch   1/2") == 1, "one process reports"
    assert_close(tmp_path / "run", alone("float64", 0), 1e-9)


def test_two_machines_have_the_numbers_of_one_process(given, alone, tmp_path, monkeypatch):
    """In the TPU form of the network, whose batch norm is another function."""
    monkeypatch.setenv("SMALL_DTYPE", "float64")
    overrides = given | {"save_dir": str(tmp_path / "run"), "space_to_depth": 2}
    with train(overrides, machines=2) as agents:
        printed, _ = finished(agents)
    assert "device: cpu: 4 processes on 2 machines, fp32" in printed
    assert printed.count("epoch   1/2") == 1
    assert_close(tmp_path / "run", alone("float64", 2), 1e-9)


def test_the_first_steps_in_float32(given, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALL_DTYPE", "float32")
    with train(given | {"save_dir": str(tmp_path / "run"), "space_to_depth": 0}) as agents:
        finished(agents)
    first, expected = (log(f)[0]["loss"] for f in (tmp_path / "run", alone("float32", 0)))
    assert first == pytest.approx(expected, rel=1e-5)


# --- faults --------------------------------------------------------------------------------------


def test_killed_workers_change_nothing(given, tmp_path):
    """First the one that has no files, then the main process."""
    given = given | {"epochs": 10, "save_minutes": A_MOMENT}
    with train(given | {"save_dir": str(tmp_path / "whole")}) as agents:
        finished(agents)
    folder = tmp_path / "killed"
    flags = ("--max-restarts", "2")
    with train(given | {"save_dir": str(folder)}, "auto", flags=flags) as [agent]:
        left = []
        for rank in (1, 0):
            begin = steps_of(folder)
            while steps_of(folder) < begin + 3:
                assert agent.poll() is None
                time.sleep(0.02)
            os.kill(workers(agent)[rank], signal.SIGKILL)
            time.sleep(0.3)  # a step that was in flight may still be saved
            left.append(steps_of(folder))
        printed, errors = finished([agent])
    assert 0 < left[0] < left[1] < 2 * given["epochs"], "both were killed while they trained"
    assert printed.count("resuming") == 2
    assert "Traceback" not in errors
    assert numbers(folder) == numbers(tmp_path / "whole")
    assert_same_weights(folder, tmp_path / "whole")


def steps_of(folder):
    """Steps behind the newest checkpoint, two an epoch (20 images in batches of 8)."""
    return steps_saved(folder, of_an_epoch=2)


def test_sigterm_to_torchrun_saves_once_and_stops(given, tmp_path):
    """With loader processes: torchrun sends the signal to them, too."""
    folder = tmp_path / "run"
    given = given | {"epochs": 400, "workers": 2, "save_dir": str(folder)}
    with train(given) as [agent]:
        while len(log(folder)) < 1:
            assert agent.poll() is None
            time.sleep(0.02)
        agent.send_signal(signal.SIGTERM)
        printed, errors = agent.communicate(timeout=100)
    assert printed.count("SIGTERM: saving, then stopping") == 1
    assert printed.count("stopped by SIGTERM") == 1
    assert "loader" not in errors
    done = torch.load(folder / "checkpoint.pkl", weights_only=True)
    epochs = done["epoch"] + 1
    # One process continues what two began.
    assert "resuming" in small.train({"epochs": epochs + 1, "workers": 0}, str(folder))
    done = torch.load(folder / "checkpoint.pkl", weights_only=True)
    assert done["optimizer"]["state"][0]["step"].item() == 2 * (epochs + 1), "every step once"


# --- requests ------------------------------------------------------------------------------------

COMMAND = """
import os, sys
from pathlib import Path
from mshnet.cli import main_tpu
code = main_tpu(sys.argv[2:])
(Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(code))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("flags", "machines", "reason"),
    [
        (["--epoch", "3"], 2, "unrecognized arguments: --epoch 3"),
        (["--dataset-dir", "nowhere"], 1, "data set folder nowhere does not exist"),
        (
            ["--batch-size", "5"],
            1,
            "shared by 2 processes, and must be a multiple of 2; use 4 or 6",
        ),
    ],
)
def test_a_wrong_request_is_one_line(tmp_path, flags, machines, reason):
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    request = [script, tmp_path, "--device", "cpu", *flags]
    with torchrun(*request, machines=machines) as agents:
        errors = [agent.communicate(timeout=120)[1].splitlines() for agent in agents]
    said = [[line for line in lines if line.startswith("main_tpu.py: ")] for lines in errors]
    assert [len(lines) for lines in said] == [1, 0][:machines], "the first machine reports"
    assert reason in said[0][0]
    codes = [(tmp_path / str(rank)).read_text() for rank in range(2 * machines)]
    assert codes == ["2"] * 2 * machines


# --- the parts -----------------------------------------------------------------------------------


def run_parts(test, tmp_path):
    """Run a function of this file in two processes."""
    script = tmp_path / "parts.py"
    here, root = str(Path(__file__).parent), str(Path(__file__).parents[2])
    script.write_text(
        f"import sys\nsys.path[:0] = [{here!r}, {root!r}]\n"
        f"from test_torchrun import {test.__name__} as it\nit()\n"
    )
    with torchrun(script) as agents:
        finished(agents)


def exchange():
    """Every operation once; the errors that they end in."""
    from mshnet.training import backend as backends
    from tpuscope.engine.processes import is_reported_elsewhere, joined
    from tpuscope.errors import RequestError

    with joined() as group:
        assert (group.count, group.machines, group.local_count) == (2, 1, 2)
        rank = group.rank
        assert group.from_main(lambda: f"from {rank}") == "from 0"
        assert group.together(lambda: rank) == rank
        assert group.first_on_each_machine(lambda: rank) == rank
        assert group.gather(torch.tensor([2**53 + rank])).tolist() == [[2**53], [2**53 + 1]]
        with joined() as same:
            assert same is group
        x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
        y = torch.ones(2, 2, dtype=torch.float64) * rank
        mean, other = group.mean(x, y)
        assert mean.item() == 1.5 and other.tolist() == [[0.5, 0.5], [0.5, 0.5]]
        (mean * (1 + 2 * rank)).sum().backward()
        assert x.grad is not None and x.grad.item() == 2, "the mean of 1 and 3"
        backend = backends.make_backend("cpu")
        assert (backend.cores, backend.is_main_process) == (2, rank == 0)
        assert backend.max_over_processes(-5 + rank) == -4
        assert backend.sum_over_processes(torch.tensor([1.0, rank])).tolist() == [2, 1]
        backend.check_same(b"the same hash in each process 32")
        with pytest.raises(RuntimeError, match="weights differ: 0: "):
            backend.check_same(bytes([rank]) * 32)

    def refuse():
        if rank == 1:
            raise RequestError("no such image", "missing-image")

    with pytest.raises(RequestError) as error, joined() as group:
        group.together(refuse)
    assert (str(error.value), error.value.code) == (
        "process 1 of 2: no such image",
        "missing-image",
    )
    assert is_reported_elsewhere(error.value) == (rank == 1)


def normalize():
    """Batch norm of two halves of a batch against PyTorch's layer with all of it."""
    from torch import nn

    from mshnet.batch_norm import BatchNorm2d, batch_norm
    from tpuscope.engine.processes import joined

    with joined() as group:
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            torch.manual_seed(0)
            x = (torch.randn(4, 3, 5, 6) + 2).to(dtype).requires_grad_()
            gradient = torch.randn(4, 3, 5, 6).to(dtype)
            exact, layer = nn.BatchNorm2d(3).to(dtype), BatchNorm2d(3).to(dtype)
            layer.processes = group
            expected = exact(x)
            expected.backward(gradient)
            share = x[mine].detach().clone().requires_grad_()
            found = batch_norm(layer, share)
            found.backward(gradient[mine])
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(found, expected[mine], **close)
            torch.testing.assert_close(share.grad, x.grad[mine], **close)
            torch.testing.assert_close(layer.running_mean, exact.running_mean, **close)
            torch.testing.assert_close(layer.running_var, exact.running_var, **close)
            [weight] = group.mean(layer.weight.grad)
            torch.testing.assert_close(2 * weight, exact.weight.grad, **close)
        half = batch_norm(layer, x[mine].detach().bfloat16())
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), found, rtol=0.02, atol=0.02)


def wait_in_vain():
    """A process that lives and does not answer."""
    import datetime

    from tpuscope.engine.processes import joined
    from tpuscope.errors import Failed

    with joined(datetime.timedelta(seconds=2)) as group:
        if group.is_main:
            with pytest.raises(Failed, match="process 0 of 2 lost another one"):
                group.gather(torch.zeros(1))
        else:
            time.sleep(3)


@pytest.mark.parametrize("test", [exchange, normalize, wait_in_vain])
def test_processes(test, tmp_path):
    run_parts(test, tmp_path)
