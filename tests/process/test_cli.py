"""The commands as a user meets them: exit codes, messages, results."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mshnet import MSHNet, api
from mshnet.cli import main, main_tpu
from tpuscope.engine import torch_xla as runtime

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--base-size", "32", "--crop-size", "32", "--batch-size", "2", "--workers", "0"]


@pytest.fixture
def data(tiny_dataset, tmp_path, monkeypatch):
    """A sound data set as ``data`` in an otherwise empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    # The answers are those of a machine without accelerators, whatever this one has.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "tpu_chips", lambda: 0)
    return tiny_dataset(folder=tmp_path / "data")


@pytest.fixture
def weights(tmp_path):
    """Weights of an untrained network of the official size."""
    torch.manual_seed(0)
    path = tmp_path / "weights.pkl"
    torch.save(MSHNet().state_dict(), path)
    return path


# Each break leaves a folder `data` with one thing wrong in it, or a file that is not what it seems.


def sound(data):
    pass


def no_list(data):
    (data / "trainval.txt").unlink()


def empty_list(data):
    (data / "trainval.txt").write_text("\n\n")


def unknown_name(data):
    (data / "trainval.txt").write_text("train_0\ntrain_1\nghost\n")


def no_mask(data):
    (data / "masks" / "train_1.png").unlink()


def no_masks_folder(data):
    shutil.rmtree(data / "masks")


def truncated(data):
    path = data / "images" / "train_1.png"
    path.write_bytes(path.read_bytes()[:-200])


def other_size(data):
    Image.new("L", (16, 16)).save(data / "masks" / "test_1.png")


def masks_of_one(data):
    for path in (data / "masks").iterdir():
        Image.fromarray((np.asarray(Image.open(path)) > 0).astype(np.uint8)).save(path)


def empty_weights(data):
    Path("w.pkl").write_bytes(b"")


def foreign_weights(data):
    torch.save({"model": torch.nn.Linear(1, 1)}, "w.pkl")  # a pickled class: could run code


def text_weights(data):
    Path("w.pkl").write_text("not a weight file")


def narrow_weights(data):
    torch.save(MSHNet(widths=(4, 8, 16, 32, 64)).state_dict(), "w.pkl")


def other_network(data):
    torch.save(torch.nn.Linear(2, 2).state_dict(), "w.pkl")


def no_tensors(data):
    torch.save({"epoch": 3}, "w.pkl")


def numbered_weights(data):
    torch.save({1: torch.zeros(1)}, "w.pkl")


def earlier_run(data):
    Path("run").mkdir()
    Path("run/checkpoint.pkl").write_bytes(b"x")


def file_as_folder(data):
    Path("run").write_text("")


def damaged_run(data):
    folder = data.parent / "run"
    folder.mkdir()
    (folder / "checkpoint.pkl").write_bytes(b"PK\x03\x04 half of a file")


def foreign_archive(data):
    (data.parent / "set.zip").write_bytes(b"no archive at all")


# What is wrong, and the part of the message that names the offending value (and the way out,
# where that is the point).
BAD_TRAINING = [
    (sound, "--dataset-dir nowhere", "nowhere"),
    (no_masks_folder, "", "masks"),
    (no_list, "", "trainval.txt"),
    (empty_list, "", "trainval.txt"),
    (unknown_name, "", "ghost"),
    (no_mask, "", "train_1"),
    (truncated, "", "images/train_1.png"),
    (other_size, "", "test_1.png"),
    (masks_of_one, "", "255"),
    (sound, "--batch-size 5", "--batch-size 5"),
    (sound, "--batch-size 0", "--batch-size 0: must be at least 1"),
    (sound, "--batch-size 1000000000", "--batch-size 1000000000: must be at most 1048576"),
    (sound, "--epochs -3", "--epochs -3: must be at least 1"),
    (sound, "--epochs 1000000000", "--epochs 1000000000: must be at most 100000"),
    (sound, "--lr 0", "--lr 0.0: "),
    (sound, "--lr nan", "--lr nan: "),
    (sound, "--lr 1e300", "--lr 1e+300: must be a positive number of at most 1e+38"),
    (sound, "--lr fast", "'fast'"),
    (sound, "--warm-epoch -1", "--warm-epoch -1: must be at least 0"),
    (sound, "--warm-epoch 1000000", "--warm-epoch 1000000: must be at most 100000"),
    (sound, "--workers -1", "--workers -1: must be at least 0"),
    (sound, "--workers 1000", "--workers 1000: must be at most 256"),
    (sound, "--base-size 100", "--base-size 100: must be a multiple of 16, for example 96"),
    (sound, "--base-size 1600000", "--base-size 1600000: must be at most 4096"),
    (sound, "--crop-size 40", "--crop-size 40: must be a multiple of 16, for example 32"),
    (sound, "--crop-size 16384", "--crop-size 16384: must be at most 4096"),
    (sound, "--channels 2", "--channels 2: must be one of 1, 3"),
    (sound, "--space-to-depth 3", "--space-to-depth 3: must be one of 0, 1, 2, 4, 8, 16"),
    (sound, "--precision fp16", "'fp16'"),
    (sound, "--device gpu", "'gpu'"),
    (sound, "--use-tpu", "Runtime > Change runtime type > v5e-1 TPU"),
    (sound, "--num-cores 8 --device cpu", "--num-cores 8: --device cpu"),
    (sound, "--num-cores 0", "--num-cores 0: must be at least 1"),
    (sound, "--strategy both", "'both'"),
    (sound, "--save-minutes 0", "--save-minutes 0.0: "),
    (sound, "--max-minutes -5", "--max-minutes -5.0: "),
    (sound, "--max-minutes 1e300", "--max-minutes 1e+300: "),
    (sound, "--resume auto", "--save-dir"),
    (sound, "--save-dir /content/drive/MyDrive/run", "Drive is not mounted"),
    (sound, "--backup /content/drive/MyDrive/run", "Drive is not mounted"),
    (damaged_run, "--save-dir run --resume auto", "--resume auto: "),
    (sound, "--stage --dataset-dir gone.zip", "gone.zip"),
    (foreign_archive, "--stage --dataset-dir set.zip", "set.zip"),
    (foreign_archive, "--dataset-dir set.zip", "--stage"),
    (sound, "--device cuda", "--device cuda: "),
    (sound, "--bach-size 4", "--bach-size 4"),
    (sound, "--weight-path gone.pkl", "gone.pkl"),
    (sound, "--weight-path data", "data is a folder"),
    (empty_weights, "--weight-path w.pkl", "w.pkl"),
    (foreign_weights, "--weight-path w.pkl", "w.pkl"),
    (text_weights, "--weight-path w.pkl", "w.pkl"),
    (narrow_weights, "--weight-path w.pkl", "w.pkl"),
    (other_network, "--weight-path w.pkl", "w.pkl"),
    (no_tensors, "--weight-path w.pkl", "w.pkl"),
    (earlier_run, "--save-dir run", "--resume run"),
    (file_as_folder, "--save-dir run", "--save-dir run"),
    (sound, "--save-dir /proc/run", "--save-dir /proc/run"),
    (sound, "--resume gone", "--resume gone: "),
    (narrow_weights, "--resume w.pkl", "--weight-path w.pkl"),
    (sound, "--mode test", "--weight-path is missing"),
    (sound, "--mode test --resume run", "--resume run"),
    (sound, "--seed 9999999999999999999999", "--seed 9999999999999999999999: "),
    (sound, "--epoch 3", "--epoch 3"),
    (numbered_weights, "--weight-path w.pkl", "w.pkl"),
]


@pytest.mark.parametrize(
    ("broken", "flags", "expected"),
    BAD_TRAINING,
    ids=[f"{broken.__name__} {flags}".strip() for broken, flags, _ in BAD_TRAINING],
)
def test_a_wrong_request_is_one_line_and_exit_2(data, capsys, broken, flags, expected):
    broken(data)
    before = set(data.parent.rglob("*"))
    arguments = flags.split()
    if "--dataset-dir" not in arguments:
        arguments += ["--dataset-dir", "data"]
    usual = [*SMALL] if "--use-tpu" in arguments else [*SMALL, "--epochs", "1", "--device", "cpu"]
    assert main_tpu([*usual, *arguments]) == 2
    message = capsys.readouterr().err
    print(f"{flags or broken.__name__}: {message}")
    assert expected in message
    assert message.count("\n") == 1
    left = set(data.parent.rglob("*")) - before - {Path.cwd() / "weight"}
    assert not left, "a refused request leaves nothing behind"


def refused(capsys, *arguments):
    """Return the one line that a wrong request is answered with."""
    assert main_tpu([*SMALL, "--dataset-dir", "data", "--use-tpu", *arguments]) == 2
    message = capsys.readouterr().err
    print(f"{' '.join(arguments)}: {message}")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ("9", "--num-cores 9: "),
        ("2", "--num-cores 2: "),
    ],
)
def test_cores_that_xla_on_the_cpu_does_not_have(data, capsys, monkeypatch, cores, expected):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(runtime, "is_open", lambda: True)
    message = refused(capsys, "--num-cores", cores)
    assert expected in message
    assert cores == "2" or "use --num-cores 8" in message


@pytest.mark.parametrize("strategy", ["spmd", "launch"])
def test_a_batch_that_the_cores_cannot_share(data, capsys, monkeypatch, strategy):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(runtime, "is_open", lambda: False)
    for batch, choices in ((2, "use 8"), (12, "use 8 or 16")):
        flags = ["--num-cores", "8", "--batch-size", str(batch), "--strategy", strategy]
        message = refused(capsys, *flags)
        assert f"--batch-size {batch}: " in message and choices in message


def test_the_literal_line_chooses_a_batch_that_eight_cores_share(tmp_path, capsys, monkeypatch):
    """``python main_tpu.py --use-tpu --num-cores 8``: the default of 4 images is for one core."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr("mshnet.data.source.TRAIN_SCENES", 8)
    monkeypatch.setattr("mshnet.data.source.TEST_SCENES", 2)
    monkeypatch.setattr(runtime, "is_open", lambda: False)  # as in a process of its own
    monkeypatch.setattr(api, "_backend", lambda config, log: None)
    trained = []

    def train(run, *_):
        trained.append(run.config)
        return {"stopped": None}

    monkeypatch.setattr(api, "_train", train)
    assert main_tpu(["--use-tpu", "--num-cores", "8"]) == 0
    [config] = trained
    assert (config.batch_size, config.num_cores, config.strategy) == (8, 8, "spmd")
    [line] = [x for x in capsys.readouterr().out.splitlines() if "--batch-size" in x]
    assert "--batch-size 8" in line and "8 cores" in line


def test_eight_cores_train_without_a_batch_size(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_dataset(train=8, folder=tmp_path / "data")
    flags = ["--dataset-dir", "data", "--base-size", "16", "--crop-size", "16", "--workers", "0"]
    done = start("--use-tpu", "--num-cores", "8", "--epochs", "1", *flags, "--save-dir", "run")
    output, errors = done.communicate(timeout=500)
    assert done.returncode == 0, errors
    assert json.loads(Path("run/config.json").read_text())["batch_size"] == 8
    assert "--batch-size 8" in output


def start(*flags):
    """Start main_tpu.py as a process of its own, with XLA on the CPU."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "main_tpu.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_loader_process_is_one_line(data):
    flags = ["--dataset-dir", "data", *SMALL[:-1], "1", "--device", "cpu", "--epochs", "100000"]
    run = start(*flags, "--save-dir", "run")
    try:
        deadline = time.monotonic() + 200
        while not (children := loaders(run.pid)) or not Path("run/checkpoint.pkl").exists():
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()
            time.sleep(0.2)
        os.kill(children[0], signal.SIGKILL)
        _, errors = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 1, errors
    assert "--workers" in errors or "DataLoader worker" in errors
    assert "Traceback" not in errors
    assert errors.count("\n") == 1
    assert torch.load("run/checkpoint.pkl", weights_only=True)["epoch"] >= 0


def loaders(parent):
    """Return the forked children of a process: they have its command line."""
    command = Path(f"/proc/{parent}/cmdline").read_bytes()
    pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes() == command]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate"
                     " memory: you tried to allocate 40 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error"),
        OSError(12, "Cannot allocate memory"),
    ],
)  # fmt: skip
def test_out_of_memory_is_one_line_and_debug_shows_the_traceback(capsys, monkeypatch, error):
    def train(*_):
        raise error

    monkeypatch.setattr(api, "train", train)
    assert main(["train", "--device", "cpu"]) == 1
    message = capsys.readouterr().err
    assert "memory" in message and message.count("\n") == 1
    assert main(["train", "--device", "cpu", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    def train(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(api, "train", train)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        main(["train", "--device", "cpu"])


def test_divergence_is_one_line_and_exit_1(data, capsys):
    flags = [*SMALL, "--dataset-dir", "data", "--device", "cpu", "--epochs", "3"]
    assert main_tpu([*flags, "--lr", "1e30", "--save-dir", "run"]) == 1
    message = capsys.readouterr().err
    assert "epoch 1" in message and "--lr 1e+30" in message and message.count("\n") == 1
    assert not list(Path("run").glob("*.pkl"))


def test_replicas_that_diverge_end_together(data):
    flags = ["--dataset-dir", "data", *SMALL, "--use-tpu", "--num-cores", "2", "--lr", "1e30"]
    run = start(*flags, "--strategy", "launch", "--epochs", "3", "--save-dir", "run")
    _, errors = run.communicate(timeout=500)
    assert run.returncode == 1, errors
    assert "--lr 1e+30" in errors and "Traceback" not in errors
    assert not list(Path("run").glob("*.pkl"))


def test_a_test_takes_no_larger_batch_than_the_split(data, weights, monkeypatch):
    taken = []
    monkeypatch.setattr(api, "_evaluate", lambda config, *_: taken.append(config) or (None, {}))
    monkeypatch.setattr(api, "_results", lambda *_: {})
    flags = ["--dataset-dir", "data", "--base-size", "32", "--device", "cpu"]
    flags += ["--batch-size", "100000", "--weight-path", str(weights)]
    assert main(["test", *flags]) == 0
    assert taken[0].batch_size == 2  # images of the split


@pytest.mark.parametrize(
    ("chips", "cores", "expected"),
    [
        (1, 8, "use --num-cores 1"),
        (8, 3, "use 1 or 2 or 4 or 8"),
        (4, 8, "use --num-cores 4"),
    ],
)
def test_cores_that_a_tpu_does_not_have(data, capsys, monkeypatch, chips, cores, expected):
    monkeypatch.setattr(runtime, "tpu_chips", lambda: chips)
    assert expected in refused(capsys, "--num-cores", str(cores))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-cores 2", "use --num-cores 4"),
        ("--num-cores 1", "use --num-cores 4"),
        ("--num-cores 4 --strategy launch", "use --strategy spmd"),
    ],
)
def test_a_part_of_a_slice(data, capsys, monkeypatch, flags, expected):
    """It would train on every machine for itself, and each would write."""
    monkeypatch.setattr(runtime, "tpu_chips", lambda: 4)
    monkeypatch.setattr(runtime, "is_open", lambda: False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", ",".join(f"worker-{i}" for i in range(8)))
    assert expected in refused(capsys, *flags.split())


def test_a_compile_cache_that_cannot_be_written(data, capsys, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    arguments = ["--dataset-dir", "data", *SMALL, "--use-tpu", "--compile-cache", "/proc/cache"]
    assert main_tpu(arguments) == 2
    assert "--compile-cache /proc/cache" in capsys.readouterr().err


def test_too_little_space_is_refused_before_training(data, capsys, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main_tpu(["--dataset-dir", "data", *SMALL, "--device", "cpu"]) == 2
    assert "3 MB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["predict", "gone.png", "--weight-path", "W"], "gone.png"),
        (["predict", "data/images/test_0.png"], "--weight-path is missing"),
        (["predict", "data/trainval.txt", "--weight-path", "W"], "trainval.txt"),
        (["check-data", "nowhere"], "nowhere"),
        (["test", "--batch-size", "1000000000", "--weight-path", "W"], "must be at most 1048576"),
        (["doctor", "--cores", "0"], "--cores 0: "),
        (["fly"], "'fly'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_requests_of_the_other_commands(data, weights, capsys, arguments, expected):
    arguments = [str(weights) if a == "W" else a for a in arguments]
    assert main([*arguments] + (["--device", "cpu"] if arguments[0] == "predict" else [])) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.count("\n") == 1


def test_train_test_predict_end_to_end(data, capsys):
    arguments = ["--dataset-dir", "data", *SMALL, "--epochs", "2", "--warm-epoch", "0"]
    assert main_tpu([*arguments, "--device", "cpu", "--save-dir", "run", "--json"]) == 0
    captured = capsys.readouterr()
    best = json.loads(captured.out)  # nothing else on standard output
    assert best["run"] == "run"
    assert "epoch   2/2 full" in captured.err

    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    required = "epoch loss iou niou pd fa seconds images_per_second compilations fallbacks"
    assert [r["epoch"] for r in records] == [0, 1]
    assert [r["phase"] for r in records] == ["warm-up", "full"]
    assert all(set(required.split()) <= set(r) for r in records)
    for name in ("config.json", "weight.pkl", "checkpoint.pkl", "curves.png", "examples.png"):
        assert Path("run", name).stat().st_size > 0, name
    assert json.loads(Path("run/config.json").read_text())["batch_size"] == 2

    # The file opens anywhere, and the best epoch's numbers come back from it.
    content = torch.load("run/weight.pkl", weights_only=True)
    MSHNet().load_state_dict(content["state_dict"])
    flags = ["--dataset-dir", "data", "--base-size", "32", "--batch-size", "2", "--device", "cpu"]
    assert main(["test", *flags, "--weight-path", "run/weight.pkl", "--json"]) == 0
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert results["corrected"]["iou"] == best["iou"]
    assert results["official"]["fa"] == best["fa_official"]
    assert "corrected definition, test split (2 images) at 32×32" in captured.err

    flags = ["--weight-path", "run/weight.pkl", "--base-size", "32", "--device", "cpu"]
    assert main(["predict", "data/images", "data/images/test_*.png", *flags]) == 0
    assert "detections in 6 images" in capsys.readouterr().out
    assert len(list(Path("predictions/overlays").iterdir())) == 6
    assert Path("predictions/detections.csv").read_text().startswith("image,x,y,area,score")


def test_check_data_says_ready_or_exits_2(data, capsys):
    assert main(["check-data", "data"]) == 0
    assert "ready for training" in capsys.readouterr().out
    truncated(data)
    assert main(["check-data", "data", "--json"]) == 2
    assert "train_1.png cannot be read" in json.loads(capsys.readouterr().out)["errors"][0]


def test_without_a_data_set_the_built_in_scenes_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mshnet.data.source.TRAIN_SCENES", 4)
    monkeypatch.setattr("mshnet.data.source.TEST_SCENES", 2)
    assert main(["train", *SMALL, "--epochs", "1", "--device", "cpu"]) == 0
    assert "no --dataset-dir: using built-in synthetic scenes" in capsys.readouterr().out
    assert len(list(Path("weight").glob("MSHNet-*"))) == 1


# Runs each of the command lines in one process; prints its exit code and output, and last what
# has been imported.
ANSWERS = """
import contextlib, io, json, sys
from mshnet.cli import main, main_tpu
answers = []
for program, argv in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            code = {"mshnet": main, "main_tpu.py": main_tpu}[program](argv)
        except SystemExit as exit:
            code = exit.code
    answers.append([code, printed.getvalue()])
print(json.dumps([answers, sorted(sys.modules)]))
"""
COMMANDS = ("train", "test", "predict", "check-data", "doctor", "aot")


def test_help_version_and_argument_errors_import_nothing_heavy():
    """They answered after 6 seconds of imports."""
    helps = [["main_tpu.py", ["--help"]], ["mshnet", ["--help"]]]
    helps += [["mshnet", [command, "--help"]] for command in COMMANDS]
    lines = [*helps, ["mshnet", ["--version"]], ["mshnet", ["train", "--epochs", "many"]]]
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS, json.dumps(lines)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    answers, modules = json.loads(done.stdout)
    assert [code for code, _ in answers] == [0] * (len(lines) - 1) + [2]
    heavy = {"torch", "torch_xla", "numpy", "scipy", "skimage", "matplotlib", "PIL"}
    assert not heavy & set(modules)
    for (program, argv), (_, printed) in zip(helps, answers, strict=False):
        assert f"usage: {program}" in printed, argv
        assert "--debug" in printed, argv
    assert all(command in answers[1][1] for command in COMMANDS)


def test_the_help_names_every_setting_and_its_default(capsys):
    """A setting of a run that the command line cannot change, or a flag without a word."""
    from mshnet.training.config import Config

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = " ".join(capsys.readouterr().out.split("examples:")[0].split())
    for name in set(Config.__dataclass_fields__) - {"widths", "depths"}:
        assert f"--{name.replace('_', '-')} " in printed, name
    for name in ("epochs", "lr", "warm_epoch", "base_size", "seed", "save_minutes"):
        text = printed.split(f" --{name.replace('_', '-')} ")[-1].split(" --")[0]
        assert f"(default: {Config.__dataclass_fields__[name].default})" in text, name


@pytest.fixture(scope="module")
def no_xla(tmp_path_factory):
    """Environment of a Python that has everything installed here but torch_xla."""
    folder = tmp_path_factory.mktemp("site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith("torch_xla") and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    keep = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
    return keep | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def run_without_xla(environment, *commands):
    """Run commands side by side; for each its exit code and what it printed.

    -S: the usual site-packages, where torch_xla is, are not looked at.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-S", *command], env=environment, **pipes)
        for command in commands
    ]
    printed = [process.communicate(timeout=300) for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, printed)
    ]


def test_without_torch_xla_everything_but_the_tpu_works(data, no_xla):
    train = ["--dataset-dir", "data", *SMALL, "--epochs", "1", "--save-dir", "run"]
    hidden, trained = run_without_xla(
        no_xla, ["-c", "import torch_xla"], [str(ROOT / "main_tpu.py"), *train]
    )
    assert "No module named 'torch_xla'" in hidden.stderr
    assert trained.returncode == 0, trained.stderr
    assert "device: c" in trained.stdout  # --device auto: cpu, or cuda where there is one

    mshnet, weights = ["-m", "mshnet"], ["--weight-path", "run/weight.pkl", "--base-size", "32"]
    tested, predicted, refused, looked = run_without_xla(
        no_xla,
        [*mshnet, "test", "--dataset-dir", "data", *weights],
        [*mshnet, "predict", "data/images", *weights],
        [*mshnet, "train", "--use-tpu", *SMALL],
        [*mshnet, "doctor", "--require", "xla"],
    )
    assert tested.returncode == 0, tested.stderr
    assert predicted.returncode == 0, predicted.stderr
    assert refused.returncode == 2
    assert "torch_xla is not installed" in refused.stderr
    assert looked.returncode == 1, looked.stderr
    assert "not usable for --require xla: torch_xla, not installed" in looked.stdout
    assert "training can run on c" in looked.stdout
