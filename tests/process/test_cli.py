"""The commands as a user meets them: exit codes, messages, results."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mshnet import MSHNet
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


BAD_TRAINING = [
    (sound, "--dataset-dir nowhere", "nowhere does not exist; datasets/README.md"),
    (no_masks_folder, "", "has no folder masks/"),
    (no_list, "", "has no train list; expected trainval.txt"),
    (empty_list, "", "trainval.txt is empty"),
    (unknown_name, "", "names ghost, but"),
    (no_mask, "", "has no train_1 as png, bmp or jpg"),
    (truncated, "", "images/train_1.png cannot be read as an image"),
    (other_size, "", "test_1.png is 32×32 but its mask"),
    (masks_of_one, "", "multiplied by 255"),
    (sound, "--batch-size 5", "(4 images); use at most 4"),
    (sound, "--batch-size 0", "--batch-size 0: must be at least 1"),
    (sound, "--epochs -3", "--epochs -3: must be at least 1"),
    (sound, "--lr 0", "--lr 0.0: must be a positive number"),
    (sound, "--lr nan", "--lr nan: must be a positive number"),
    (sound, "--lr fast", "argument --lr: invalid float value: 'fast'"),
    (sound, "--warm-epoch -1", "--warm-epoch -1: must be 0 or more"),
    (sound, "--workers -1", "--workers -1: must be 0 or more"),
    (sound, "--base-size 100", "--base-size 100: must be a multiple of 16, for example 96"),
    (sound, "--crop-size 40", "--crop-size 40: must be a multiple of 16, for example 32"),
    (sound, "--channels 2", "--channels 2: must be one of 1, 3"),
    (sound, "--space-to-depth 3", "--space-to-depth 3: must be one of 0, 1, 2, 4, 8, 16"),
    (sound, "--precision fp16", "argument --precision: invalid choice: 'fp16'"),
    (sound, "--device gpu", "argument --device: invalid choice: 'gpu'"),
    (sound, "--use-tpu", "Runtime > Change runtime type > v5e-1 TPU"),
    (sound, "--num-cores 8 --device cpu", "--num-cores 8: --device cpu trains on 1"),
    (sound, "--num-cores 0", "--num-cores 0: must be at least 1"),
    (sound, "--strategy both", "argument --strategy: invalid choice: 'both'"),
    (sound, "--save-minutes 0", "--save-minutes 0.0: must be a positive number of minutes"),
    (sound, "--max-minutes -5", "--max-minutes -5.0: must be a positive number of minutes"),
    (sound, "--resume auto", "looks for a checkpoint in --save-dir and --backup; name a folder"),
    (sound, "--save-dir /content/drive/MyDrive/run", "Drive is not mounted; first run"),
    (sound, "--backup /content/drive/MyDrive/run", "Drive is not mounted; first run"),
    (damaged_run, "--save-dir run --resume auto", "no checkpoint in run is whole; start a new"),
    (sound, "--stage --dataset-dir gone.zip", "gone.zip does not exist"),
    (foreign_archive, "--stage --dataset-dir set.zip", "set.zip"),
    (foreign_archive, "--dataset-dir set.zip", "set.zip is a file; --stage unpacks archives"),
    (sound, "--device cuda", "PyTorch finds no CUDA GPU; choose --device cpu"),
    (sound, "--bach-size 4", "unrecognized arguments: --bach-size 4"),
    (sound, "--weight-path gone.pkl", "gone.pkl does not exist"),
    (sound, "--weight-path data", "data is a folder; name the file in it"),
    (empty_weights, "--weight-path w.pkl", "w.pkl is empty"),
    (foreign_weights, "--weight-path w.pkl", "holds Python objects besides tensors"),
    (text_weights, "--weight-path w.pkl", "w.pkl is damaged, or holds Python objects"),
    (narrow_weights, "--weight-path w.pkl", "is for an MSHNet of other widths"),
    (other_network, "--weight-path w.pkl", "is not for this MSHNet"),
    (no_tensors, "--weight-path w.pkl", "holds no weights"),
    (earlier_run, "--save-dir run", "holds an earlier run; continue it with --resume run"),
    (file_as_folder, "--save-dir run", "--save-dir run cannot be written"),
    (sound, "--save-dir /proc/run", "--save-dir /proc/run cannot be written"),
    (sound, "--resume gone", "--resume gone: there is no gone"),
    (narrow_weights, "--resume w.pkl", "holds weights but no training state"),
    (sound, "--mode test", "--weight-path is missing"),
    (sound, "--mode test --resume run", "testing resumes nothing"),
    (sound, "--seed 9999999999999999999999", "must be below 2**63"),
    (sound, "--epoch 3", "unrecognized arguments: --epoch 3"),
    (numbered_weights, "--weight-path w.pkl", "holds no weights"),
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
    given = [*SMALL, "--epochs", "1", "--device", "cpu", *arguments]
    if "--use-tpu" in arguments:
        given = [*SMALL, *arguments]
    assert main_tpu(given) == 2
    message = capsys.readouterr().err
    print(f"{flags or broken.__name__}: {message}")
    assert expected in message
    assert message.count("\n") == 1
    left = set(data.parent.rglob("*")) - before - {Path.cwd() / "weight"}
    assert not left, "a refused request leaves nothing behind"


def refused(capsys, *arguments):
    """The one line that a request is answered with."""
    given = [*SMALL, "--dataset-dir", "data", "--use-tpu", *arguments]
    assert main_tpu(given) == 2
    message = capsys.readouterr().err
    print(f"{' '.join(arguments)}: {message}")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ("9", "--num-cores 9: XLA on the CPU has 8 virtual ones"),
        ("2", "--num-cores 2: this process has opened its device already"),
    ],
)
def test_cores_that_xla_on_the_cpu_does_not_have(data, capsys, monkeypatch, cores, expected):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    message = refused(capsys, "--num-cores", cores)
    assert expected in message
    assert cores == "2" or "Kaggle's TPU v5e-8 has 8" in message


@pytest.mark.parametrize("strategy", ["spmd", "launch"])
def test_a_batch_that_the_cores_cannot_share(data, capsys, monkeypatch, strategy):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(runtime, "is_open", lambda: False)
    for batch, choices in ((2, "use 8"), (12, "use 8 or 16")):
        flags = ["--num-cores", "8", "--batch-size", str(batch), "--strategy", strategy]
        message = refused(capsys, *flags)
        assert f"--batch-size {batch}: it is the global batch, shared by 8 cores" in message
        assert choices in message


@pytest.mark.parametrize(
    ("chips", "cores", "expected"),
    [
        (1, 8, "--num-cores 8: this machine has 1 (Colab's TPUs have 1 core"),
        (8, 3, "--num-cores 3: cores are taken by rectangles of the board; use 1 or 2 or 4 or 8"),
        (4, 8, "--num-cores 8: this machine has 4"),
    ],
)
def test_cores_that_a_tpu_does_not_have(data, capsys, monkeypatch, chips, cores, expected):
    monkeypatch.setattr(runtime, "tpu_chips", lambda: chips)
    assert expected in refused(capsys, "--num-cores", str(cores))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--num-cores 2",
            "one of 8 of a slice, and all of its cores take part",
        ),
        ("--num-cores 1", "use --num-cores 4"),
        ("--num-cores 4 --strategy launch", "it is for one machine, and this is one of 8"),
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
    assert "--compile-cache /proc/cache cannot be written" in capsys.readouterr().err


def test_too_little_space_is_refused_before_training(data, capsys, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main_tpu(["--dataset-dir", "data", *SMALL, "--device", "cpu"]) == 2
    assert "has 3 MB free, a run writes up to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["predict", "gone.png", "--weight-path", "W"], "gone.png names no image"),
        (["predict", "data/images/test_0.png"], "--weight-path is missing"),
        (["predict", "data/trainval.txt", "--weight-path", "W"], "cannot be read as an image"),
        (["check-data", "nowhere"], "nowhere does not exist"),
        (["doctor", "--cores", "0"], "--cores 0: must be at least 1"),
        (["fly"], "invalid choice: 'fly'"),
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


@pytest.mark.parametrize(
    "command", [[], ["train"], ["test"], ["predict"], ["check-data"], ["doctor"]]
)
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command, "--help"])
    assert exit.value.code == 0
    assert "usage: mshnet" in capsys.readouterr().out


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
    said = [process.communicate(timeout=300) for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, said)
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
