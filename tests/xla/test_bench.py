"""``mshnet bench``: every row runs on small sizes, and compares numbers before times."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench
import cases
import convolutions
import measure
import numpy as np
import pytest
import reference
import scaling_curves
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from official_data import OfficialMetrics
from torch.utils.flop_counter import FlopCounterMode

from mshnet import MSHNet, RequestError, cli
from mshnet.data.scenes import write_scenes
from mshnet.metrics import DetectionMetrics

ROOT = Path(__file__).resolve().parents[2]

NETWORK = ["--widths", "2", "2", "2", "2", "2", "--depths", "1", "1", "1", "1", "1"]
SMALL = ["--size", "32", "--epoch-size", "32", "--batch-size", "2", "--rounds", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_scenes(
        tmp_path_factory.mktemp("scenes") / "data", train=6, test=3, size=48, progress=False
    )


@pytest.fixture(scope="module")
def small(data):
    return cases.Settings(
        str(data), 32, 2, 1, 32, 6, widths=(2, 2, 2, 2, 2), depths=(1, 1, 1, 1, 1)
    )


def on_xla(settings):
    """Return two rows from one process, because they compile the same programs."""
    return cases.xla_step(settings) + cases.epoch(settings, lambda part, given: part(given))


def command(folder):
    """Run the fast rows as a user does."""
    argv = [sys.executable, "-m", "mshnet", "bench", "--dataset-dir", str(folder), "--json"]
    argv += ["--only", "cpu_step", "loader", "evaluation_cpu", "--images", "6"]
    return subprocess.run([*argv, *SMALL, *NETWORK], capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def apart(data, small, tmp_path_factory):
    """Start the slow rows, each in its own process, two at a time: no time is asserted."""
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with ThreadPoolExecutor(2) as pool:
        compiling = {
            row.__name__: pool.submit(measure.alone, row, small, **cache)
            for row in (on_xla, cases.tpu_bytes, cases.evaluation)
        }
        yield compiling | {"command": pool.submit(command, data)}


def test_the_command_ends_with_one_json_line(apart):
    done = apart["command"].result()
    assert done.returncode == 0, done.stderr
    [text] = done.stdout.splitlines()
    answer = json.loads(text)
    keys = ["cpu_step", "cpu_step_memory", "loader", "loader_512", "feed_bytes"]
    assert list(answer["ratios"]) == [*keys, "evaluation_cpu", "metrics"]
    # float32 RGB and mask, 16 bytes a pixel, against a byte and a bit.
    assert answer["ratios"]["feed_bytes"] == pytest.approx(16 / 1.125, abs=1e-3)
    assert answer["met"]["feed_bytes"] is True
    assert answer["failed"] == []
    assert answer["not measured"] == ([] if torch.cuda.is_available() else ["cuda_step"])
    checked = {row["key"]: row["checked"] for row in answer["rows"]}
    assert "gradients within" in checked["cpu_step"]
    assert "IoU" in checked["evaluation_cpu"]
    assert "| `loader` |" in done.stderr


def test_on_xla_both_implementations_evaluate_to_the_same_numbers(apart):
    [row] = apart["evaluation"].result()
    assert row.key == "evaluation"
    assert "IoU" in row.checked
    assert "metrics that cost nothing" in row.note


def test_on_xla_only_the_official_implementation_falls_back(apart):
    found = {row.key: row for row in apart["on_xla"].result()}
    keys = ["xla_step", "trace", "trace_alone", "compile"]
    assert list(found) == [*keys, "epoch", "epoch_cold"]
    assert found["epoch"].checked == "3 and 3 steps"
    assert found["xla_step"].note == "7 host fallbacks a step, ours none"
    assert "ours 1;" in found["compile"].note
    assert all(value > 0 for row in found.values() for value in (*row.official, *row.ours))


def test_convolutions_are_all_of_the_network_s():
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        MSHNet().eval()(torch.empty(1, 3, 64, 64), True)
    whole = counted.get_flop_counts()["Global"][torch.ops.aten.convolution]
    found = convolutions.convolutions(64)
    ours = sum(times * convolutions.gigaflops(case, 1) for case, times in found.items())
    assert ours == pytest.approx(1e-9 * whole, rel=1e-3)  # but for those of single pixels
    assert convolutions.time_of((2, 1, 3, 8), 1, "innermost") > 0
    assert convolutions.time_of((2, 1, 3, 8), 1, "XLA") > 0


def test_the_tpu_s_compiler_counts_both_implementations(apart):
    [row] = apart["tpu_bytes"].result()
    assert row.official[0] > row.ours[0] > 0


def test_the_rows_of_a_gpu_run_as_far_as_a_cpu_goes(small):
    reports = {}
    for name in ("official", "ours"):
        step = cases._make_step(small, "cpu", "bf16", False, name)
        getattr(step, name)()
        reports[name] = step.report()
    losses = (reports[name]["losses"] for name in ("official", "ours"))
    assert "loss of the first step" in cases._same_losses(*losses, 0.1)
    assert reports["ours"]["peak"] > 1e8


# --- numbers are compared before times -----------------------------------------------------------


def test_numbers_that_differ_are_no_comparison(small, monkeypatch):
    with pytest.raises(RuntimeError, match=r"loss of the first step: 0\.5 here, 0\.6 in the"):
        cases._same_losses({"official": [0.6]}, {"ours": [0.5]})
    numbers = dict.fromkeys(("iou", "pixel_accuracy", "pd", "fa"), 0.5) | {"tpr": [1], "fpr": [0]}
    cases._same_numbers(numbers, numbers)
    with pytest.raises(RuntimeError, match=r"pd: 0\.4 here"):
        cases._same_numbers(numbers, numbers | {"pd": 0.4})


def test_a_row_that_fails_is_named_and_the_others_go_on(data, monkeypatch, capsys):
    monkeypatch.setitem(cases.ROWS, "broken", broken)
    argv = ["--dataset-dir", str(data), *SMALL, "--only", "broken", "loader", "--images", "4"]
    assert bench.main(argv) == 1
    said = capsys.readouterr()
    assert "broken: failed: loss: 1 here, 2 in the official implementation" in said.err
    assert json.loads(said.out.splitlines()[-1])["failed"] == ["broken"]
    assert "`loader`" in said.out


def broken(settings):
    measure.close(1, 2, 0.1, "loss")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), noise=st.floats(0, 6))
def test_the_official_metrics_equal_the_package_s_official_definition(seed, noise):
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(3, 1, 32, 32)
    masks[0, 0, 4:7, 5:9] = masks[1, 0, 20:22, 20:24] = masks[1, 0, 3:5, 3:5] = 1
    masks[2, 0, 10:12, 10:12] = 1
    logits = 8 * (masks - 0.5) + noise * torch.randn(masks.shape, generator=generator)
    official, ours = OfficialMetrics(32), DetectionMetrics(32, "official")
    for i in range(3):
        official.update(logits[i : i + 1], masks[i : i + 1])
    ours.update(logits, masks)
    found = ours.compute()
    for name, value in official.numbers().items():
        np.testing.assert_allclose({**found, **found["roc"]}[name], value, rtol=1e-6)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--only xla_stop", "--only xla_stop: choose of xla_step, cpu_step"),
        ("--size 50", "size 50: "),
        ("--rounds 0", "--rounds 0: must be at least 1"),
        ("--batch-size 7", "--batch-size 7: more than the 6 training images"),
        ("--official /nowhere", "--official /nowhere: model/MSHNet.py, model/loss.py"),
        ("--sizes 50", "unrecognized arguments: --sizes 50 (`mshnet bench --help`"),
    ],
)
def test_a_wrong_request_is_one_line(data, flags, text, capsys):
    argv = ["bench", "--dataset-dir", str(data), "--batch-size", "2", *flags.split()]
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flags", [["--device", "cuda"], ["--only", "cuda_step"]])
def test_a_gpu_that_is_missing_is_refused(data, flags, capsys):
    assert cli.main(["bench", "--dataset-dir", str(data), "--batch-size", "2", *flags]) == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


def test_a_checkout_that_does_not_import_names_what_is_missing(tmp_path, monkeypatch):
    for name in reference.FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import something_that_nobody_has\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RequestError, match="something_that_nobody_has"):
        reference.choose(str(tmp_path))


# --- rows and growth -----------------------------------------------------------------------------


def test_ratios_are_how_many_times_better_ours_is():
    time = measure.Row("a", "", "s", [4, 6, 8], [2, 2, 4])
    assert time.ratio == 3
    assert time.spread == (2, 3)
    rate = measure.Row("b", "", "samples/s", [10, 10], [30, 50], goal=3)
    assert rate.ratio == 4
    assert rate.spread == (3, 5)
    assert "3× met" in bench.markdown([rate])


def test_growth_is_a_slope_and_a_start():
    slope, start = scaling_curves._line([1, 2, 4], [3, 5, 9])
    assert (slope, start) == (pytest.approx(2), pytest.approx(1))


def test_metrics_grow_with_the_targets_and_are_drawn(small):
    points, figure, words = scaling_curves.targets(small)
    assert sorted(points) == [1, 4, 16, 36, 64]
    assert all(value > 0 for pair in points.values() for value in pair)
    assert len(figure.axes[0].lines) == len(words) == 2


def test_ten_thousand_names_are_links_to_a_few_scenes(tmp_path):
    folder = scaling_curves._many(tmp_path / "data", 120)
    assert len(list((folder / "images").iterdir())) == 120
    for cache in ("none", "ram"):
        point = scaling_curves._cache_point(str(folder), cache)
        assert point["rate"] > 0


def test_batches_reach_the_device(small):
    assert measure.alone(scaling_curves._feed_point, small, 1, 1, PJRT_DEVICE="CPU") > 0
