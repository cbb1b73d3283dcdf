"""``mshnet aot``: the project's own steps, the search for the largest batch, and the command."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mshnet import estimate
from mshnet.cli import main
from tpuscope import aot
from tpuscope.aot import compiler
from tpuscope.engine import torch_xla as runtime

if not runtime.installed():
    pytest.skip("torch_xla is not installed on this system", allow_module_level=True)

NARROW = {"widths": (2, 2, 2, 2, 2), "depths": (1, 1, 1, 1, 1), "base_size": 16}

# How many cores a process has is settled once; phases can share one.
TRACES = """
import json
from mshnet import estimate
traced = {}
for phase in estimate.PHASES:
    step = estimate.request(%r | {"batch_size": 2}, phase, "v5e:1x1")
    program = estimate._trace(step)
    traced[phase] = [program.digest, len(program.aliases)]
print(json.dumps(traced))
"""


@pytest.fixture(scope="module")
def traced():
    done = subprocess.run(
        [sys.executable, "-c", TRACES % NARROW],
        capture_output=True,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "CPU"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_phase_is_a_program_of_its_own(traced):
    assert len({digest for digest, _ in traced.values()}) == len(estimate.PHASES)


def test_training_updates_its_state_in_place_and_evaluation_has_none(traced):
    aliases = {name: count for name, (_, count) in traced.items()}
    # Parameters and Adagrad's sums; in the warm-up the other heads are not updated.
    assert aliases["train"] > aliases["warmup"] > 2 * 100
    assert aliases["eval"] == 0


def run(capsys, *flags):
    code = main(["aot", *flags])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_command_reports_in_json_and_answers_again_from_its_cache(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--phase", "eval", "--base-size", "16", "--batch-size", "1", "--precision", "bf16"]
    code, output, _ = run(capsys, *flags, "--json")
    values = json.loads(output)
    assert code == 0
    assert (values["fits"], values["cached"], values["cores"]) == (True, False, 1)
    assert (values["phase"], values["batch_size"], values["precision"]) == ("eval", 1, "bf16")
    assert values["hbm_bytes"] > values["arguments_bytes"] > 4 * 4_000_000  # 4 M parameters
    assert any(layer["layer"] == "MSHNet.decoder_0.0" for layer in values["layers"])

    code, output, _ = run(capsys, *flags)
    assert code == 0
    assert "MSHNet, evaluation step, batch 1, 16×16, bf16" in output
    assert "an earlier answer" in output and "MSHNet.decoder_0" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology", "v9:1x1"], "--topology v9:1x1 is not known; choose one of v2:1x1"),
        (["--topology", "v5e:3x3"], "use v5e:1x1 v5e:2x2"),
        (["--topology", "v5e:2x4", "--batch-size", "12"], "multiple of 8; use 8 or 16"),
        (["--topology", "v5e:2x4", "--num-cores", "9"], "v5e:2x4 has 8"),
        (["--num-cores", "0"], "--num-cores 0: must be at least 1"),
        (["--base-size", "60"], "--base-size 60: must be a multiple of 16"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--phase", "never"], "--phase: invalid choice: 'never'"),
        (["--effort", "much"], "--effort: invalid choice: 'much'"),
    ],
)
def test_a_wrong_request_is_one_line_and_nothing_is_traced(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(estimate, "trace", lambda step: pytest.fail("traced"))
    code, output, errors = run(capsys, *flags)
    assert (code, output) == (2, "")
    assert words in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("topology", "batch_size", "given", "columns"),
    [
        ("v5e:1x1", 32, None, 8),
        ("v5e:1x1", 128, None, 1),
        ("v5e:2x4", 128, None, 8),
        ("v5e:1x1", 32, 0, 0),
    ],
)
def test_the_step_is_the_one_that_a_tpu_would_take(topology, batch_size, given, columns):
    step = estimate.request({"batch_size": batch_size, "space_to_depth": given}, "train", topology)
    assert step.as_dict()["space_to_depth"] == columns
    assert step.with_images(128).fold == (1 if given is None else given)


def test_without_the_compiler_the_command_says_what_to_install(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    code, _, errors = run(capsys)
    assert code == 2
    assert "pip install jax==" in errors and errors.count("\n") == 1


def test_a_compiler_that_is_killed_is_one_line_and_exit_code_1(capsys, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(compiler, "_WORKER", worker)
    monkeypatch.setattr(estimate, "trace", lambda step: aot.Program(b"program"))
    code, output, errors = run(capsys, "--no-cache")
    assert (code, output) == (1, "")
    assert "runs out of memory" in errors and errors.count("\n") == 1


def answer(step, most):
    """A report of a compiler that has room for so many images on a core."""
    fits = step.images <= most
    costs = {"bytes_accessed": 1e9, "flops": 1e9, "padding": 1.0, "roofline_seconds": 0.001}
    return aot.Report(
        topology=step.topology,
        cores=step.config.num_cores,
        effort="fast",
        compiles=fits,
        fits=fits,
        hbm_bytes=step.images,
        hbm_limit_bytes=most,
        program="",
        libtpu="",
        buffers=[],
        **(costs if fits else {}),
    )


@given(start=st.integers(1, 300), most=st.integers(0, 2000), cores=st.sampled_from([1, 8]))
def test_a_sweep_finds_the_largest_batch_to_an_eighth_and_asks_for_none_twice(start, most, cores):
    topology = {1: "v5e:1x1", 8: "v5e:2x4"}[cores]
    first = estimate.request({"batch_size": start * cores}, "train", topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "compile_step", lambda step, *_: answer(step, most))
        tried = list(estimate.sweep(first))
    images = [step.images for step, _ in tried]
    assert images[0] == start and len(set(images)) == len(images) <= 15
    assert all(step.config.batch_size == step.images * cores for step, _ in tried)
    best, summary = estimate.largest(tried), estimate.sweep_summary(tried)
    if most == 0:
        assert best is None and "not even one image" in summary
    else:
        assert most - max(1, best.images // 8) < best.images <= most
        assert f"--batch-size {best.config.batch_size} " in summary


def test_a_sweep_prints_a_line_for_each_try_and_json_beside_it(capsys, monkeypatch):
    monkeypatch.setattr(estimate, "compile_step", lambda step, *_: answer(step, 11))
    code, output, _ = run(capsys, "--sweep", "--batch-size", "8")
    lines = output.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[3:-2]] == ["8", "16", "12", "10", "11"]
    assert "DOES NOT FIT" in lines[4] and "1.0×" in lines[3]
    assert "the largest that fits: --batch-size 11" in lines[-1]

    code, output, beside = run(capsys, "--sweep", "--batch-size", "8", "--json")
    values = json.loads(output)
    assert values["largest_batch_size"] == 11
    assert [tried["batch_size"] for tried in values["tried"]] == [8, 16, 12, 10, 11]
    assert "the largest that fits" in beside
