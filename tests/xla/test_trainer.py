"""Whole runs of a narrow network: budgets on XLA, exact resume, divergence, the run's folder."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from mshnet import MSHNet, RequestError, api
from mshnet.data.scenes import write_scenes
from mshnet.training import evaluation, step, trainer
from mshnet.training.backend import Backend, XlaBackend
from mshnet.training.preemption import GO_ON, SAVE, STOP, Session
from mshnet.training.step import evaluation_step
from mshnet.training.trainer import TrainingDiverged
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


def weights(folder, name="checkpoint.pkl"):
    state = torch.load(folder / name, weights_only=True)
    return state["net"] if "net" in state else state["state_dict"]


@pytest.fixture
def scenes(tmp_path):
    return str(write_scenes(tmp_path / "scenes", train=10, test=6, size=32, progress=False))


def test_a_run_on_xla_keeps_its_budgets(scenes, tmp_path, monkeypatch):
    # Three graphs: warm-up, full phase, evaluation. Six test images are a batch and a half.
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    settings = NARROW | {"dataset_dir": scenes, "device": "tpu", "epochs": 4, "warm_epoch": 1}
    traced = itertools.count()  # a list that grows would be a Python value that the step changes

    def traced_step(*args):
        next(traced)
        return evaluation_step(*args)

    monkeypatch.setattr(evaluation, "evaluation_step", traced_step)
    with watch(budget=Budget(compilations=3, fallbacks=0)) as w:
        api.train(settings | {"save_dir": str(tmp_path / "run"), "workers": 2})
    assert w.report().fine, str(w.report())
    log = records(tmp_path / "run")
    assert sum(r["compilations"] for r in log) <= w.report().compilations
    assert [r["compilations"] for r in log][-1] == 0
    assert [r["host_reads"] for r in log] == [1] * 4, "the mean loss"
    assert [r["evaluation_reads"] for r in log] == [4] * 4, "logits and masks of two batches"
    assert next(traced) == 4, "twice for all epochs, twice for the best weights at the end"


def test_a_read_in_the_step_is_counted(scenes, tmp_path, monkeypatch):
    """The budget above can fail: not only ``.item()`` is a read, ``.cpu()`` is one, too."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    train_step = step.train_step

    def reading(*args):
        loss = train_step(*args)
        loss.cpu()
        return loss

    monkeypatch.setattr(step, "train_step", reading)
    settings = NARROW | {"dataset_dir": scenes, "device": "tpu", "epochs": 1}
    api.train(settings | {"save_dir": str(tmp_path / "run")})
    assert records(tmp_path / "run")[0]["host_reads"] == 1 + 2  # two steps


class WithDropout(MSHNet):
    """An MSHNet that depends on the device's random numbers."""

    def forward(self, images, warm_flag):
        images = torch.nn.functional.dropout(images, 0.3, self.training)
        return super().forward(images, warm_flag)


def interrupted(steps, then=STOP):
    """A class of sessions that stop (or save) once, after so many steps of the first epoch."""

    class Interrupted(Session):
        asked = 0

        def due(self, next_seconds=0.0):
            self.asked += 1
            return then if self.asked == steps else GO_ON

        def reason(self):
            return "the test"

    return Interrupted


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", ["tpu", "cpu"])
def test_a_resumed_run_with_dropout_is_the_uninterrupted_one(
    tmp_path, monkeypatch, device, compiled
):
    if compiled and device == "cpu":
        pytest.skip("only XLA compiles steps")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(trainer, "MSHNet", WithDropout)
    if not compiled:
        monkeypatch.setattr(XlaBackend, "compile_step", Backend.compile_step)
    scenes = write_scenes(tmp_path / "scenes", train=16, test=4, size=32, progress=False)
    settings = NARROW | {"dataset_dir": str(scenes), "device": device, "epochs": 2}
    settings |= {"warm_epoch": 0}
    api.train(settings | {"save_dir": str(tmp_path / "whole")})
    folder = tmp_path / "parts"
    for after in (3, 6):  # within each of two epochs of four steps
        with monkeypatch.context() as patch:
            patch.setattr(api, "Session", interrupted(after if after == 3 else 4))
            resume = None if after == 3 else str(folder)
            done = api.train({} if resume else settings | {"save_dir": str(folder)}, resume=resume)
            assert done["stopped"] == "the test"
    api.train({}, resume=str(folder))
    whole, parts = records(tmp_path / "whole"), records(folder)
    assert [r["loss"] for r in parts] == [r["loss"] for r in whole]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(value, expected[name]) for name, value in weights(folder).items())


def test_dropout_masks_differ_between_steps_and_seeds(scenes, tmp_path, monkeypatch):
    """Or the test above would hold for a frozen mask."""
    seen = []

    def draw(self, value):
        Backend.seed(self, value)
        seen.append((value, torch.rand(1).item()))

    monkeypatch.setattr(trainer, "MSHNet", WithDropout)
    monkeypatch.setattr("mshnet.training.backend.CpuBackend.seed", draw)
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 2}
    for seed in (0, 1):
        api.train(settings | {"seed": seed, "save_dir": str(tmp_path / f"run-{seed}")})
    assert len(seen) == len({value for value, _ in seen}) == len({x for _, x in seen}) == 8


def test_a_run_that_diverges_stops_before_it_saves(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 3, "lr": 1e30}
    folder = tmp_path / "run"
    with pytest.raises(TrainingDiverged) as error:
        api.train(settings | {"save_dir": str(folder)})
    assert error.value.code == "diverged"
    assert "epoch 1" in str(error.value) and "--lr 1e+30" in str(error.value)
    assert not list(folder.glob("*.pkl")) and records(folder) == []


def test_the_last_finite_checkpoint_survives_divergence(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 2}
    folder = tmp_path / "run"
    api.train(settings | {"save_dir": str(folder)})
    names = ("checkpoint.pkl", "checkpoint.previous.pkl", "weight.pkl", "metrics.jsonl")
    before = {name: (folder / name).read_bytes() for name in names}
    with pytest.raises(TrainingDiverged, match=f"--resume {folder} --lr 1e"):
        api.train({"epochs": 5, "lr": 1e30}, resume=str(folder))
    assert {name: (folder / name).read_bytes() for name in names} == before
    api.train({"epochs": 3, "lr": 0.01}, resume=str(folder))
    assert [r["epoch"] for r in records(folder)] == [0, 1, 2]


@pytest.mark.parametrize("then", [SAVE, STOP])
def test_no_checkpoint_within_an_epoch_holds_nan(scenes, tmp_path, monkeypatch, then):
    monkeypatch.setattr(api, "Session", interrupted(2, then))
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "lr": 1e30, "batch_size": 2}
    with pytest.raises(TrainingDiverged, match="epoch 1"):
        api.train(settings | {"save_dir": str(tmp_path / "run")})
    assert not list((tmp_path / "run").glob("*.pkl"))


def test_nan_weights_under_a_finite_loss_are_not_saved(scenes, tmp_path, monkeypatch):
    """The last update of an epoch is not in its mean loss."""

    def evaluate(model, *args, **kwargs):
        metrics = evaluation.evaluate(model, *args, **kwargs)
        with torch.no_grad():
            model.conv_init.weight[0] = float("nan")
        return metrics

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 2}
    with pytest.raises(TrainingDiverged, match=r"conv_init\.weight"):
        api.train(settings | {"save_dir": str(tmp_path / "run")})
    assert not list((tmp_path / "run").glob("*.pkl"))


def test_the_network_learns(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 15, "warm_epoch": 14}
    api.train(settings | {"widths": (8, 8, 8, 8, 8), "save_dir": str(tmp_path / "run")})
    losses = [r["loss"] for r in records(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.05


def test_another_seed_is_another_run_and_the_same_seed_the_same(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1}
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        api.train(settings | {"seed": seed, "save_dir": str(tmp_path / name)})
        losses.append(records(tmp_path / name)[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_bf16_on_the_cpu_trains_with_weights_in_float32(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "precision": "bf16"}
    api.train(settings | {"save_dir": str(tmp_path / "run")})
    state = torch.load(tmp_path / "run" / "checkpoint.pkl", weights_only=True)
    assert state["net"]["conv_init.weight"].dtype == torch.float32
    assert state["optimizer"]["state"][0]["sum"].dtype == torch.float32


def test_a_resumed_run_takes_its_settings_from_the_checkpoint(scenes, tmp_path):
    folder = tmp_path / "run"
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "save_dir": str(folder)}
    api.train(settings | {"epochs": 1, "seed": 7})
    api.train({"epochs": 3, "lr": 0.01}, resume=str(folder))
    assert [r["epoch"] for r in records(folder)] == [0, 1, 2]
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["base_size"], config["lr"]) == (7, 32, 0.01)
    state = torch.load(folder / "checkpoint.pkl", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert state["optimizer"]["state"][0]["step"].item() == 6  # two steps in each of three epochs


def test_a_finished_run_resumed_trains_nothing_and_says_its_best(scenes, tmp_path):
    folder = tmp_path / "run"
    settings = NARROW | {
        "dataset_dir": scenes,
        "device": "cpu",
        "save_dir": str(folder),
        "epochs": 2,
    }
    first = api.train(settings)
    before = (folder / "checkpoint.pkl").read_bytes()
    assert api.train({}, resume=str(folder)) == first
    assert (folder / "checkpoint.pkl").read_bytes() == before


def test_a_resumed_run_cannot_move(scenes, tmp_path):
    folder = tmp_path / "run"
    settings = NARROW | {
        "dataset_dir": scenes,
        "device": "cpu",
        "save_dir": str(folder),
        "epochs": 1,
    }
    api.train(settings)
    with pytest.raises(RequestError, match=r"--save-dir .*other"):
        api.train({"save_dir": str(tmp_path / "other")}, resume=str(folder))


def test_training_starts_from_given_weights(scenes, tmp_path):
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "lr": 1e-9}
    api.train(settings | {"save_dir": str(tmp_path / "a")})
    weights = str(tmp_path / "a" / "weight.pkl")
    api.train(settings | {"save_dir": str(tmp_path / "b"), "seed": 5, "weight_path": weights})
    a, b = (torch.load(tmp_path / x / "weight.pkl", weights_only=True) for x in "ab")
    key = "encoder_0.0.conv1.weight"
    assert torch.allclose(a["state_dict"][key], b["state_dict"][key], atol=1e-6)


@pytest.fixture
def finished(scenes, tmp_path):
    """A run of one epoch of warm-up, and its settings."""
    settings = NARROW | {"dataset_dir": scenes, "device": "cpu", "epochs": 1, "base_size": 48}
    api.train(settings | {"save_dir": str(tmp_path / "run")})
    return tmp_path / "run", settings


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"base_size": 64}, r"--base-size 64: .*\(48\)"),
        ({"seed": 3}, r"--seed 3: .*\(0\)"),
        ({"batch_size": 8}, r"--batch-size 8: .*\(4\)"),
        ({"weight_path": "w.pkl"}, "--weight-path w.pkl: "),
        ({"epochs": 0}, "--epochs 0: .*1"),
    ],
)
def test_what_would_make_it_another_run_is_refused(finished, change, expected):
    with pytest.raises(RequestError, match=expected):
        api.train(change, resume=str(finished[0]))


def test_fewer_epochs_than_are_done_is_refused(finished):
    api.train({"epochs": 2}, resume=str(finished[0]))
    with pytest.raises(RequestError, match=r"--epochs 1: .* 2"):
        api.train({"epochs": 1}, resume=str(finished[0]))


def test_a_run_is_resumed_from_another_working_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    api.train({"epochs": 2}, resume=str(finished[0]))
    assert [r["epoch"] for r in records(finished[0])] == [0, 1]


def test_a_lost_log_does_not_stop_a_resumed_run(finished):
    (finished[0] / "metrics.jsonl").unlink()
    state = torch.load(finished[0] / "checkpoint.pkl", weights_only=True)
    best = api.train({"epochs": 2}, resume=str(finished[0]))
    [second] = records(finished[0])  # the lost lines do not come back
    assert second["epoch"] == 1
    assert best["iou"] == max(state["best"]["iou"], second["iou"])


def test_lost_best_weights_are_noticed_before_training(finished):
    (finished[0] / "weight.pkl").unlink()
    with pytest.raises(RequestError, match=r"weight\.pkl"):
        api.train({"epochs": 2}, resume=str(finished[0]))


@pytest.mark.parametrize("damage", [{"config": 3}, {"epoch": "x"}, {"optimizer": {}}])
def test_a_checkpoint_with_foreign_content_is_refused(finished, damage):
    path = finished[0] / "checkpoint.pkl"
    torch.save(torch.load(path, weights_only=True) | damage, path)
    with pytest.raises(RequestError, match="is damaged"):
        api.train({"epochs": 2}, resume=str(finished[0]))


@pytest.mark.parametrize("name", ["weight.pkl", "checkpoint.pkl"])
def test_weights_know_their_network_their_image_size_and_their_head(finished, name):
    folder, settings = finished
    results = api.test({"dataset_dir": settings["dataset_dir"], "weight_path": str(folder / name)})
    assert results["corrected"]["iou"] == records(folder)[0]["iou"]
    assert "at 48×48 grey" in results["corrected"]["protocol"]


def test_predict_does_not_write_over_a_data_set(finished, scenes):
    folder, _ = finished
    with pytest.raises(RequestError, match=f"--out {scenes}") as error:
        api.predict_files(
            {"weight_path": str(folder / "weight.pkl")}, [f"{scenes}/images"], Path(scenes)
        )
    assert error.value.code == "overwrites-data"
