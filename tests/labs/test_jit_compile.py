"""Lab 13. This process has torch_xla (tests/conftest.py), so TensorFlow's half runs in another."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labs.jit_compile import compare
from labs.jit_compile.programs import Call, Programs, bars, dumping, prepare, table
from labs.jit_compile.text import LONGEST, TEXT, buffer, decode, encode, room, up_to
from tpuscope.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]

# -- without a framework ---------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 50))
def test_a_padded_length_is_the_smallest_multiple_that_is_long_enough(number, multiple):
    padded = up_to(number, multiple)
    assert padded % multiple == 0 and number <= padded < number + multiple


@given(st.text(st.characters(max_codepoint=127), min_size=1))
def test_a_text_survives_being_numbers(text):
    assert decode(encode(text)) == text


def test_prompts_of_one_multiple_get_buffers_of_one_shape():
    buffers = [buffer(prompt, 8, 16) for prompt in ("a", "several words", "sixteen letters.")]
    assert {tokens.shape for tokens, _ in buffers} == {(1, 24)}
    assert [length for _, length in buffers] == [1, 13, 16]
    assert all(not tokens[0, length:].any() for tokens, length in buffers)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (lambda: encode(""), "the text is empty"),
        (lambda: encode("wärme"), "'ä' is not ASCII"),
        (lambda: up_to(5, 0), "multiple is 0"),
        (lambda: room(5, 0), "new is 0"),
        (lambda: buffer("a" * 40, 24, 32), f"are 88; the generator sees {LONGEST}"),
        (lambda: compare.torch_linears(0, 0, 0, ["float64"]), "dtype is 'float64'"),
    ],
)
def test_a_wrong_request_names_its_value(request_, complaint):
    with pytest.raises(RequestError, match=complaint):
        request_()


def test_the_flags_that_are_there_stay_and_the_folder_is_replaced():
    flags = dumping("--xla_a=1 --xla_dump_to=/old --xla_b=2", Path("/new"))
    assert flags == "--xla_a=1 --xla_b=2 --xla_dump_to=/new"


def test_programs_are_counted_by_the_files_that_a_call_leaves(tmp_path):
    def compiles(name):
        (tmp_path / f"module_{name}.before_optimizations.txt").touch()
        (tmp_path / f"module_{name}.cpu_after_optimizations.txt").touch()
        return name

    programs = Programs(tmp_path)
    assert programs.call(compiles, "a").compiled == 1
    assert programs.call(compiles, "a").compiled == 0  # it is there already
    both = programs.calls(compiles, [("b",), ("c",)])
    assert (both.compiled, both.result, programs.count()) == (2, "c", 3)


def test_beside_torch_xla_tensorflow_is_not_prepared():
    with pytest.raises(RuntimeError, match="torch_xla is imported already"):
        prepare()


def test_operations_are_counted_in_the_entry_and_in_the_fusions():
    text = """\
HloModule layer

%fused (p: f32[4,8], q: f32[8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %wide = f32[4,8]{1,0} broadcast(%q), dimensions={1}
  ROOT %sum = f32[4,8]{1,0} add(%p, %wide)
}

ENTRY %main (x: f32[4,16], w: f32[16,8], b: f32[8]) -> f32[4,8] {
  %x = f32[4,16]{1,0} parameter(0)
  %w = f32[16,8]{1,0} parameter(1)
  %b = f32[8]{0} parameter(2)
  %dot.1 = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = f32[4,8]{1,0} fusion(%dot.1, %b), kind=kLoop, calls=%fused
}
"""
    assert compare.operations(text) == {"dot": 1, "fusion": 1}
    assert compare.fused(text) == {"broadcast": 1, "add": 1}
    both = {"whole": compare.operations(text), "inside": compare.fused(text)}
    shown = compare.side_by_side(both)
    assert [line.split() for line in shown.splitlines()][1] == ["add", "–", "1"]


def test_calls_become_a_table_and_bars():
    calls = [Call(None, 0.5, 1, 1), Call(None, 0.002, 0, 0)]
    lines = table([("first", calls[0]), ("later", calls[1])]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["first", "1", "1", "500.0"],
        ["later", "0", "0", "2.0"],
    ]
    axis = bars({"one": calls, "other": calls}, ["a", "b"]).axes[0]
    assert [round(bar.get_height(), 3) for bar in axis.patches] == [500.0, 2.0, 500.0, 2.0]


# -- TensorFlow, in one process --------------------------------------------------------------------

TENSORFLOW = """
import json, sys
import numpy as np
from labs.jit_compile.programs import prepare

programs = prepare()
import tensorflow as tf
from labs.jit_compile import generator, keras_side
from labs.jit_compile.text import TEXT, buffer
from tpuscope.errors import RequestError

prepare()  # once more changes nothing
tf.get_logger().setLevel("ERROR")
given = json.load(sys.stdin)
x, weight, bias = (np.array(given[name], np.float32) for name in ("x", "weight", "bias"))

model = generator.decoder()
training = programs.call(generator.train, model, TEXT, 3)
tokens, length = buffer("A target", 8, 16)
other = np.where(np.arange(tokens.shape[1]) < length, tokens, 77)
logits = [model(t).numpy()[:, :length] for t in (tokens, other)]

growing, loop = generator.next_character(model), generator.generator(model, 6)
prompts = ("A", "A target")
short = [programs.call(generator.write_growing, growing, prompts[1], 2)]
free = [programs.call(generator.write, loop, prompt, 6) for prompt in prompts]
padded = [programs.call(generator.write, loop, prompt, 6, 16) for prompt in prompts]
try:
    generator.train(model, "too short")
    refusal = ""
except RequestError as error:
    refusal = str(error)

linear = keras_side.keras_linear(x, weight, bias, "float32")
print(json.dumps({
    "torch_xla": "torch_xla" in sys.modules,
    "training": [training.compiled, training.result[0], training.result[-1]],
    "apart": float(np.abs(logits[0] - logits[1]).max()),
    "texts": [[call.result for call in way] for way in (short, free, padded)],
    "traced": [[call.traced for call in way] for way in (short, free, padded)],
    "compiled": [[call.compiled for call in way] for way in (short, free, padded)],
    "refusal": refusal,
    "linear": [linear.before, linear.after, linear.result.tolist()],
    "experiments": {n: vars(e) for n, e in keras_side.keras_experiments(programs).items()},
}))
"""


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    shapes = {"x": (4, 16), "weight": (8, 16), "bias": (8,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run_tensorflow(arrays):
    done = subprocess.run(
        [sys.executable, "-c", TENSORFLOW],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=json.dumps({name: array.tolist() for name, array in arrays.items()}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def halves(arrays):
    """What three processes find, which run at the same time: importing is most of their work."""
    with ThreadPoolExecutor() as pool:
        return {
            name: future.result()
            for name, future in {
                "tensorflow": pool.submit(run_tensorflow, arrays),
                "linears": pool.submit(compare.torch_linears, *arrays.values(), ["float32"]),
                "experiments": pool.submit(compare.torch_experiments),
            }.items()
        }


@pytest.fixture(scope="module")
def tensorflow(halves):
    return halves["tensorflow"]


def test_tensorflows_half_never_loads_torch_xla(tensorflow):
    assert not tensorflow["torch_xla"]


def test_the_generator_learns_with_one_compiled_program(tensorflow):
    compiled, first, last = tensorflow["training"]
    assert compiled == 1 and last < 0.9 * first


def test_what_stands_behind_the_prompt_is_not_seen(tensorflow):
    assert tensorflow["apart"] < 1e-5


def test_all_ways_write_the_same_text(tensorflow):
    short, free, padded = tensorflow["texts"]
    assert free == padded
    assert free[1].startswith(short[0])
    assert [len(text) for text in padded] == [len("A") + 6, len("A target") + 6]


def test_only_the_padded_prompt_finds_the_program_of_the_one_before(tensorflow):
    assert tensorflow["compiled"] == [[2], [1, 1], [1, 0]]
    assert tensorflow["traced"] == tensorflow["compiled"]


def test_a_text_that_fills_no_batch_is_refused(tensorflow):
    assert tensorflow["refusal"] == "the text has 9 characters; a batch takes 80 or more"
    assert len(TEXT) > 2 * LONGEST


# -- both ------------------------------------------------------------------------------------------


def test_the_same_layer_becomes_the_same_program_and_the_right_numbers(halves, arrays):
    before, after, result = halves["tensorflow"]["linear"]
    [torch] = halves["linears"]
    assert compare.operations(before) != compare.operations(torch.before)
    assert compare.operations(after) == compare.operations(torch.after)
    assert compare.fused(after) == compare.fused(torch.after)
    right = np.maximum(arrays["x"] @ arrays["weight"].T + arrays["bias"], 0)
    assert np.allclose(result, right, atol=1e-5) and np.allclose(torch.result, right, atol=1e-5)


def test_shapes_compile_in_both_and_a_factor_only_in_tensorflow(halves):
    ours = {n: compare.Effort(**e) for n, e in halves["tensorflow"]["experiments"].items()}
    theirs = halves["experiments"]
    counts = {name: (ours[name].compiled, theirs[name].compiled) for name in ours}
    assert counts == {
        "the same shape": (1, 1),
        "three shapes": (3, 3),
        "the same, padded": (1, 1),
        "x * number": (3, 1),
        "x * tensor": (1, 1),
        "x ** number": (3, 3),
        "x ** tensor": (1, 1),
        "x[:, :number]": (3, 3),
        "x[:, :tensor]": (3, 3),
        compare.LOOP: (1, 1),
    }
    assert [ours[name].python for name in ours] == [1, 3, 1, 3, 1, 3, 1, 3, 1, 1]
    assert all(effort.python == 3 for effort in theirs.values())
    assert (ours[compare.LOOP].launched, theirs[compare.LOOP].launched) == (1, 3)
    assert compare.comparison(ours, theirs).count("\n") == len(ours) + 1


def test_a_half_that_fails_says_so_in_one_line(monkeypatch, arrays):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="torch_xla's half failed: exit code 1"):
        compare.torch_linears(*arrays.values(), ["float32"])
