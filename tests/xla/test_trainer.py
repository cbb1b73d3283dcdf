"""Whole runs of a narrow network: budgets on XLA, learning, and what a folder holds."""

import json
from pathlib import Path

import pytest
import torch

from mshnet import RequestError, api
from mshnet.data.scenes import write_scenes
from mshnet.training import evaluation
from mshnet.training.step import evaluation_step
from tpuscope.monitor.watch import Budget, watch

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
    traced = []

    def step(*args):
        traced.append(args)
        return evaluation_step(*args)

    monkeypatch.setattr(evaluation, "evaluation_step", step)
    with watch(budget=Budget(compilations=3, fallbacks=0)) as w:
        api.train(given | {"save_dir": str(tmp_path / "run"), "workers": 2})
    assert w.report().fine, str(w.report())
    log = records(tmp_path / "run")
    assert sum(r["compilations"] for r in log) <= w.report().compilations
    assert [r["compilations"] for r in log][-1] == 0
    assert all(r["host_reads"] <= 1 for r in log), "one read an epoch: the mean loss"
    assert len(traced) == 4, "twice for all epochs, twice for the best weights at the end"


def test_the_network_learns(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 15, "warm_epoch": 14}
    api.train(given | {"widths": (8, 8, 8, 8, 8), "save_dir": str(tmp_path / "run")})
    losses = [r["loss"] for r in records(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.05


def test_another_seed_is_another_run_and_the_same_seed_the_same(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1}
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        api.train(given | {"seed": seed, "save_dir": str(tmp_path / name)})
        losses.append(records(tmp_path / name)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_bf16_on_the_cpu_trains_with_weights_in_float32(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "precision": "bf16"}
    api.train(given | {"save_dir": str(tmp_path / "run")})
    state = torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)
    assert state["net"]["conv_init.weight"].dtype == torch.float32
    assert state["optimizer"]["state"][0]["sum"].dtype == torch.float32


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder)}
    api.train(given | {"epochs": 1, "seed": 7})
    api.train({"epochs": 3, "lr": 0.01}, resume=str(folder))
    assert [r["epoch"] for r in records(folder)] == [0, 1, 2]
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["base_size"], config["lr"]) == (7, 32, 0.01)
    state = torch.load(folder / "checkpoint.pkl", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert state["optimizer"]["state"][0]["step"].item() == 6  # two steps in each of three epochs


def test_a_finished_run_resumed_trains_nothing_and_says_its_best(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder), "epochs": 2}
    first = api.train(given)
    before = (folder / "checkpoint.pkl").read_bytes()
    assert api.train({}, resume=str(folder)) == first
    assert (folder / "checkpoint.pkl").read_bytes() == before


def test_a_resumed_run_cannot_move(scenes, tmp_path):
    folder = tmp_path / "run"
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder), "epochs": 1}
    api.train(given)
    with pytest.raises(RequestError, match="a resumed run keeps its own"):
        api.train({"save_dir": str(tmp_path / "other")}, resume=str(folder))


def test_training_starts_from_given_weights(scenes, tmp_path):
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "lr": 1e-9}
    api.train(given | {"save_dir": str(tmp_path / "a")})
    weights = str(tmp_path / "a" / "weight.pkl")
    api.train(given | {"save_dir": str(tmp_path / "b"), "seed": 5, "weight_path": weights})
    a, b = (torch.load(tmp_path / x / "weight.pkl", weights_only=True) for x in "ab")
    key = "encoder_0.0.conv1.weight"
    assert torch.allclose(a["state_dict"][key], b["state_dict"][key], atol=1e-6)


@pytest.fixture
def finished(scenes, tmp_path):
    """A run of one epoch of warm-up, and its settings."""
    given = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "base_size": 48}
    api.train(given | {"save_dir": str(tmp_path / "run")})
    return tmp_path / "run", given


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"base_size": 64}, r"--base-size 64: a resumed run keeps its own \(48\)"),
        ({"seed": 3}, r"--seed 3: a resumed run keeps its own \(0\)"),
        ({"weight_path": "w.pkl"}, r"--weight-path w.pkl: a resumed run keeps its own"),
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
    ],
)
def test_what_would_make_it_another_run_is_refused(finished, change, expected):
    with pytest.raises(RequestError, match=expected):
        api.train(change, resume=str(finished[0]))


def test_fewer_epochs_than_are_done_is_refused(finished):
    api.train({"epochs": 2}, resume=str(finished[0]))
    with pytest.raises(RequestError, match="--epochs 1: the run has trained 2 already"):
        api.train({"epochs": 1}, resume=str(finished[0]))


def test_a_run_is_resumed_from_another_working_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    api.train({"epochs": 2}, resume=str(finished[0]))
    assert [r["epoch"] for r in records(finished[0])] == [0, 1]


def test_a_lost_log_does_not_stop_a_resumed_run(finished):
    (finished[0] / "metrics.jsonl").unlink()
    best = api.train({"epochs": 2}, resume=str(finished[0]))
    assert best["epoch"] in (0, 1)


def test_lost_best_weights_are_noticed_before_training(finished):
    (finished[0] / "weight.pkl").unlink()
    with pytest.raises(RequestError, match=r"best weights, weight\.pkl, are not beside"):
        api.train({"epochs": 2}, resume=str(finished[0]))


@pytest.mark.parametrize("damage", [{"config": 3}, {"epoch": "x"}, {"optimizer": {}}])
def test_a_checkpoint_with_foreign_content_is_refused(finished, damage):
    path = finished[0] / "checkpoint.pkl"
    torch.save(torch.load(path, weights_only=True) | damage, path)
    with pytest.raises(RequestError, match="is damaged"):
        api.train({"epochs": 2}, resume=str(finished[0]))


@pytest.mark.parametrize("name", ["weight.pkl", "checkpoint.pkl"])
def test_weights_know_their_network_their_image_size_and_their_head(finished, name):
    folder, given = finished
    results = api.test({"dataset_dir": given["dataset_dir"], "weight_path": str(folder / name)})
    assert results["corrected"]["iou"] == records(folder)[0]["iou"]
    assert "at 48×48 grey" in results["corrected"]["protocol"]


def test_predict_does_not_write_over_a_data_set(finished, scenes):
    folder, _ = finished
    with pytest.raises(RequestError, match="whose masks would be overwritten"):
        given = {"weight_path": str(folder / "weight.pkl")}
        api.predict_files(given, [f"{scenes}/images"], Path(scenes))
