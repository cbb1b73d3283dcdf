"""Whole runs of a narrow network: budgets on XLA, learning, and what a folder holds."""

import json

import pytest
import torch

from mshnet import RequestError
from mshnet.data.scenes import write_scenes
from mshnet.training import run

NARROW = {
    "widths": (2, 4, 4, 8, 8),
    "depths": (1, 1, 1, 1, 1),
    "base_size": 32,
    "crop_size": 32,
    "batch_size": 4,
    "workers": 0,
}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def scenes(tmp_path):
    return str(write_scenes(tmp_path / "scenes", train=10, test=6, size=32, progress=False))


def test_a_run_on_xla_keeps_its_budgets(scenes, tmp_path, monkeypatch):
    # Three graphs: warm-up, full phase, evaluation. Six test images are a batch and a half.
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    given = NARROW | {"dataset_dir": scenes, "device": "tpu", "epochs": 4, "warm_epoch": 1}
    run.train(given | {"save_dir": str(tmp_path / "run"), "workers": 2})
    log = records(tmp_path / "run")
    assert sum(r["compilations"] for r in log) <= 3
    assert [r["compilations"] for r in log][-1] == 0
    assert sum(r["fallbacks"] for r in log) == 0
    assert all(r["host_reads"] <= 1 for r in log), "one read an epoch: the mean loss"


def test_the_network_learns(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 15, "warm_epoch": 14}
    run.train(given | {"widths": (8, 8, 8, 8, 8), "save_dir": str(tmp_path / "run")})
    losses = [r["loss"] for r in records(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.05


def test_another_seed_is_another_run_and_the_same_seed_the_same(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1}
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run.train(given | {"seed": seed, "save_dir": str(tmp_path / name)})
        losses.append(records(tmp_path / name)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_bf16_on_the_cpu_trains_with_weights_in_float32(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "precision": "bf16"}
    run.train(given | {"save_dir": str(tmp_path / "run")})
    state = torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)
    assert state["net"]["conv_init.weight"].dtype == torch.float32
    assert state["optimizer"]["state"][0]["sum"].dtype == torch.float32


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder)}
    run.train(given | {"epochs": 1, "seed": 7})
    run.train({"epochs": 3, "lr": 0.01}, resume=str(folder))
    assert [r["epoch"] for r in records(folder)] == [0, 1, 2]
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["base_size"], config["lr"]) == (7, 32, 0.01)
    state = torch.load(folder / "checkpoint.pkl", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert state["optimizer"]["state"][0]["step"].item() == 6  # two steps in each of three epochs


def test_a_finished_run_resumed_trains_nothing_and_says_its_best(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder), "epochs": 2}
    first = run.train(given)
    before = (folder / "checkpoint.pkl").read_bytes()
    assert run.train({}, resume=str(folder)) == first
    assert (folder / "checkpoint.pkl").read_bytes() == before


def test_a_resumed_run_cannot_move(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder), "epochs": 1}
    run.train(given)
    with pytest.raises(RequestError, match="a resumed run stays in its folder"):
        run.train({"save_dir": str(tmp_path / "other")}, resume=str(folder))


def test_training_starts_from_given_weights(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "lr": 1e-9}
    run.train(given | {"save_dir": str(tmp_path / "a")})
    weights = str(tmp_path / "a" / "weight.pkl")
    run.train(given | {"save_dir": str(tmp_path / "b"), "seed": 5, "weight_path": weights})
    a, b = (torch.load(tmp_path / x / "weight.pkl", weights_only=True) for x in "ab")
    key = "encoder_0.0.conv1.weight"
    assert torch.allclose(a["state_dict"][key], b["state_dict"][key], atol=1e-6)
