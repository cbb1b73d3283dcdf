# %% [markdown]
# # 13 · TensorFlow's jit_compile
#
# **The same compiler under Keras: count what is traced and what is compiled, generate text without
# compiling for every prompt, and find out which habits carry over to PyTorch/XLA.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * compile a Keras model and a function of your own, and read what XLA refuses;
# * tell tracing from compiling, and count both;
# * generate text with one program for many prompts;
# * lay the HLO of one layer, from TensorFlow and from torch_xla, side by side;
# * say what carries over to PyTorch/XLA, and what does not.
#
# **You need** lesson 04 (what a step is, and when it is compiled), and lesson 07 for its numbers
# that end up in a graph. Any runtime: everything here computes on the CPU, also where there is a
# TPU.

# %% [markdown]
# ## Setup

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("mshnet") is None:  # a fresh Colab or Kaggle session
    # --no-deps: the runtime's torch and torch_xla belong together and stay as they are.
    package = "git+{{repository}}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", package], check=True)

# %% [markdown]
# Colab's TPU image has no TensorFlow, so this lab installs `tensorflow-cpu`, and Keras in a version
# that is known to work with it. `transformers` comes for one cell, which shows what it no longer
# has. torch, torch_xla, jax and numpy stay as they are.

# %%
import os

from course import checkout, install

install("tensorflow-cpu==2.21.0", "keras==3.15.1", "transformers==5.23.0")
sys.path.insert(0, str(checkout()))

from labs.jit_compile.programs import bars, prepare, table
from tpuscope.engine import torch_xla as runtime

programs = prepare()  # before TensorFlow is imported: quiet, and every program leaves a file

# %%
import keras
import numpy as np
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # it warns when a function is retraced often: our subject
print(f"TensorFlow {tf.__version__}, Keras {keras.__version__} on {keras.backend.backend()}")
print("devices of TensorFlow:", *(device.name for device in tf.config.list_logical_devices()))
print("TPU chips of this machine:", runtime.tpu_chips())

assert "torch_xla" not in sys.modules

# %% [markdown]
# **What just happened.** TensorFlow sees a CPU, also on a machine with a TPU, because
# `tensorflow-cpu` has nothing for one. So `jit_compile` means *XLA on the CPU* in all of this
# notebook. How often something is traced or compiled is the same on any device; how many
# milliseconds it takes, and what the compiler makes of it, is not.
#
# On a TPU, TensorFlow would need the package `tensorflow-tpu`, and a model made under
# [`tf.distribute.TPUStrategy`](https://www.tensorflow.org/guide/tpu); there every `tf.function` is
# compiled by XLA without being asked, says
# [its documentation](https://www.tensorflow.org/api_docs/python/tf/function). Colab took TensorFlow
# out of its TPU image in March 2025
# ([announcement](https://github.com/googlecolab/colabtools/issues/5164)). The package's newest
# release was 2.20.0, of August 2025, when this was written, and installing it would bring a newer
# libtpu than the one that torch_xla goes with (`uv pip compile`). All of this is looked up, none of
# it tried.

# %% [markdown]
# ## Two that do not share a process
#
# This course is about torch_xla. Why is it not imported here, for comparison?

# %%
BOTH = "import tensorflow; print('TensorFlow is here', flush=True); import torch_xla"
done = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True)
print(done.stdout, *done.stderr.splitlines()[-2:], sep="\n")
print("exit code", done.returncode)

assert done.returncode != 0 and "registered more than once" in done.stderr

# %% [markdown]
# **What just happened.** Both bring a copy of LLVM, the compiler under XLA. The copies share one
# list of options, and the second one to arrive finds its options taken: it ends the process, with
# no exception to catch. (The other order, torch_xla first, got through when we tried it with these
# versions. Nobody promises that.) So this kernel runs TensorFlow, and torch_xla runs in a separate process
# wherever it is needed.

# %% [markdown]
# ## No TensorFlow at Hugging Face
#
# Tutorials on XLA text generation begin with `from transformers import TFAutoModelForCausalLM`.

# %%
OLD = "import transformers; print(transformers.__version__); from transformers import TFAutoModel"
plain = os.environ | {"PYTHON_COLORS": "0"}
done = subprocess.run([sys.executable, "-c", OLD], env=plain, capture_output=True, text=True)
print("transformers", done.stdout.strip())
print(done.stderr.splitlines()[-1].partition(" (")[0])

assert done.returncode == 1 and "cannot import name 'TFAutoModel'" in done.stderr

# %% [markdown]
# **What just happened.** Release 5 of transformers removed TensorFlow and JAX; PyTorch is all that
# is left
# ([migration guide](https://github.com/huggingface/transformers/blob/main/MIGRATION_GUIDE_V5.md)).
# The tutorials still work with releases of before. Here the generator is built with Keras itself,
# further down.

# %% [markdown]
# ## A Keras model, three ways
#
# A network that looks for targets in an infrared frame: as it is, as a graph, and compiled by XLA.

# %%
from mshnet.data.scenes import render_scene

scene, mask = render_scene(seed=3, index=0, size=128)
frames = tf.constant(scene[None, ..., None] / 255, tf.float32)  # (1, 128, 128, 1)

keras.utils.set_random_seed(0)
network = keras.Sequential(
    [
        keras.layers.Conv2D(8, 3, padding="same", activation="gelu"),
        keras.layers.Conv2D(8, 3, padding="same", activation="gelu"),
        keras.layers.Conv2D(1, 1),
    ]
)
network(frames)  # makes the weights

ways = {
    "eager": network,
    "tf.function": tf.function(network),
    "jit_compile": tf.function(network, jit_compile=True),
}
rows, results = [], []
for name, way in ways.items():
    first = programs.call(way, frames)
    rows += [(f"{name}, first", first), (f"{name}, later", programs.fastest(way, frames))]
    results.append(first.result)
print(table(rows))

assert [call.compiled for _, call in rows] == [0, 0, 0, 0, 1, 0]
assert [call.traced for _, call in rows] == [0, 0, 1, 0, 1, 0]
assert all(np.allclose(results[0], result, atol=1e-4) for result in results)

# %% [markdown]
# **What just happened.** Three things that are easily confused:
#
# | | what it is | how it is counted here |
# |---|---|---|
# | tracing | Python runs the function once, with placeholders; a graph of TensorFlow operations comes out | `experimental_get_tracing_count()` |
# | compiling | XLA turns that graph, with all shapes known, into one program | files in the folder of `--xla_dump_to` |
# | running | the program computes; Python is not asked | |
#
# TensorFlow has a public counter for the first, and none for the second. `prepare()` set
# `XLA_FLAGS=--xla_dump_to=FOLDER`, so XLA leaves files for each program, and `programs` counts them.
# Plain `tf.function` traces and never calls XLA. The results agree up to rounding.
#
# Look at the times, too: the first call pays for everything. Whether later ones are faster than
# those of plain `tf.function` is the model's and the machine's affair: compare before you believe it.

# %% [markdown]
# ## A function of your own
#
# Nothing about `jit_compile` is Keras. Here is a classical detector: how many standard deviations
# does a pixel stand out of its neighbourhood?


# %%
@tf.function(jit_compile=True)
def contrast(frames):
    """Local contrast in a window of 9 × 9: float32 (B, H, W, 1) → the same."""
    wide = tf.pad(frames, [(0, 0), (4, 4), (4, 4), (0, 0)], "REFLECT")
    mean = tf.nn.avg_pool2d(wide, 9, 1, "VALID")
    spread = tf.nn.avg_pool2d(wide**2, 9, 1, "VALID") - mean**2
    return (frames - mean) / tf.sqrt(spread + 1e-4)


from labs.jit_compile import compare
from tpuscope.figure import Picture

shown = contrast(frames)
figure = Picture(figsize=(6.5, 3.2), layout="constrained")
for axis, picture, title in zip(
    figure.subplots(1, 2), (scene, shown[0, ..., 0]), ("frame", "contrast"), strict=True
):
    axis.imshow(picture, cmap="gray")
    axis.set_title(title)
    axis.axis("off")
figure

# %%
text = contrast.experimental_get_compiler_ir(frames)
given, compiled = (compare.operations(text(stage)) for stage in ("hlo", "optimized_hlo"))
print(compare.side_by_side({"before compiling": given, "compiled": compiled}))

assert compiled.total() < given.total() and compiled["fusion"] > 0

# %% [markdown]
# **What just happened.** `experimental_get_compiler_ir` shows the function as HLO, XLA's own
# language: as TensorFlow hands it over, and after the compiler is through. `reduce-window` is the
# pooling. What surrounds it was merged into *fusions*: loops that read their inputs once and write
# one result, where eager TensorFlow would write and read a whole frame for each operation.

# %% [markdown]
# ## What XLA refuses
#
# Two errors that you will meet. The first: an operation that nobody has written for XLA. The second:
# a shape that the network computes.


# %%
@tf.function(jit_compile=True)
def smaller(frames):
    return tf.image.resize(frames, (64, 64), antialias=True)


@tf.function(jit_compile=True)
def one_row_each(frames):
    """A row of zeros for each pixel where the network sees a target."""
    return tf.zeros((tf.reduce_sum(tf.cast(network(frames) > 0, tf.int32)), 4))


messages = []
for function in (smaller, one_row_each):
    try:
        function(frames)
    except tf.errors.InvalidArgumentError as error:
        messages.append(str(error))
        print(messages[-1].partition("The op is created")[0].partition("Stack trace")[0])

assert "No registered 'ScaleAndTranslate' OpKernel for XLA_CPU_JIT" in messages[0]
assert "must be a compile-time constant" in messages[1]

# %% [markdown]
# **What just happened.** There is no way back to the host: under `jit_compile=True` the function is
# compiled as a whole or not at all. torch_xla does the opposite, and silently: what has no XLA
# lowering runs on the host and splits the step (lesson 07). An error is the more honest answer.
#
# The cures are those of the rest of this course. Resize outside of the function, or as matrix
# products. And replace "as many rows as there are targets" by a fixed number of rows and a mask that
# says which count: `tf.math.top_k(scores, 20)`.

# %% [markdown]
# ## Tracing again
#
# A function is traced again when it is called with something new. What is new?


# %%
@tf.function(jit_compile=True)
def brighten(frames, gain):
    return tf.minimum(frames * gain, 1.0)


gains = (1.5, 2.0, 2.5)
rows = [
    ("three Python numbers", programs.calls(brighten, [(frames, gain) for gain in gains])),
    ("the same numbers again", programs.calls(brighten, [(frames, gain) for gain in gains])),
    (
        "three tensors",
        programs.calls(brighten, [(frames, tf.constant(gain)) for gain in gains]),
    ),
]
print(table(rows))

assert [(call.traced, call.compiled) for _, call in rows] == [(3, 3), (0, 0), (1, 1)]

# %% [markdown]
# **What just happened.** A Python number is a part of the function: three values, three graphs,
# three programs. (That is what you want for something that has few values, such as a flag: the
# *static argument* of JAX.) A tensor is data.
#
# Shapes are a part of the function, too. TensorFlow has two ways to make the graph care less. Do they
# help the compiler?


# %%
def scale(columns):
    return tf.nn.softmax(columns * 2.0)


rough = tf.TensorSpec((None, 8), tf.float32)
kinds = {
    "jit_compile alone": tf.function(scale, jit_compile=True),
    "reduce_retracing": tf.function(scale, jit_compile=True, reduce_retracing=True),
    "input_signature": tf.function(scale, jit_compile=True, input_signature=[rough]),
    "padded to 64": tf.function(scale, jit_compile=True),
}
LENGTHS = (40, 45, 50, 55)
rows = []
for name, function in kinds.items():
    shapes = [64] * len(LENGTHS) if name == "padded to 64" else LENGTHS
    calls = programs.calls(function, [(tf.zeros((shape, 8)),) for shape in shapes])
    rows.append((name, calls))
print(table(rows))

assert [call.traced for _, call in rows] == [4, 2, 1, 1]
assert [call.compiled for _, call in rows] == [4, 4, 4, 1]

# %% [markdown]
# **What just happened.** Four lengths. `reduce_retracing` gives up on the length after the second,
# and `input_signature` with `None` never looked at it: two graphs, one graph. And in both cases
# **four programs**, because XLA needs every shape. This is the trap of the whole subject: a tracing
# count of 1 looks like success while each call waits for the compiler. Only the fixed shape has one
# program.
#
# One more, into which this lab's own first version fell. The number that decides a shape may be a
# tensor:


# %%
@tf.function(jit_compile=True)
def head(values, count):
    return values[:count]


values = tf.range(16.0)
three = [(values, tf.constant(count)) for count in (5, 9, 13)]
rows = [("three lengths", programs.calls(head, three)), ("again", programs.calls(head, three))]
print(table(rows))

assert [(call.traced, call.compiled) for _, call in rows] == [(1, 3), (0, 0)]

# %% [markdown]
# **What just happened.** No error, one graph, and a program for each *value*: TensorFlow looks at the
# number on the host, and puts it into the program as a constant. `tf.range(start, stop)` does the
# same with both of its ends. Where a number only says *which* elements count, compare positions with
# it (`tf.range(16) < count`), and it stays data.

# %% [markdown]
# ## A generator
#
# A small GPT in Keras, character by character, which is to learn a few sentences by heart.

# %%
from labs.jit_compile import generator
from labs.jit_compile.text import TEXT

model = generator.decoder()
training = programs.call(generator.train, model)
losses = training.result
print(f"{model.count_params()} parameters, {training.compiled} program for all of the training")
print(f"loss {losses[0]:.2f} → {losses[-1]:.2f} nats a character, {training.seconds:.1f} s")

assert training.compiled == 1 and losses[-1] < 0.5 * losses[0]

# %% [markdown]
# Now it writes behind three prompts of different lengths, in three ways:
#
# * **growing**: a compiled function gives the next character, and the input becomes longer by it
#   (four characters only; you will see why);
# * **loop inside**: the loop is in the compiled function, and the prompt stands in a buffer with room
#   for the answer;
# * **padded**: the same function, the prompt padded to a multiple of 32. Padding is on the right:
#   causal attention never looks there, and the prompt's length travels as a tensor.

# %%
PROMPTS = ("A new shape", "Pad the prompt, ", "The first prompt waits fo")
NEW = 24

growing = generator.next_character(model)
loop, padded = generator.generator(model, NEW), generator.generator(model, NEW)
ways = {
    "growing, 4 characters": [
        programs.call(generator.write_growing, growing, prompt, 4) for prompt in PROMPTS
    ],
    "loop inside": [programs.call(generator.write, loop, prompt, NEW) for prompt in PROMPTS],
    "padded to 32": [programs.call(generator.write, padded, prompt, NEW, 32) for prompt in PROMPTS],
}
for name, calls in ways.items():
    print(table([(f"{name}: {len(p)}", call) for p, call in zip(PROMPTS, calls)]), "\n")
for call in ways["padded to 32"]:
    print(repr(call.result))

assert [call.compiled for call in ways["growing, 4 characters"]] == [4, 4, 4]
assert [call.compiled for call in ways["loop inside"]] == [1, 1, 1]
assert [call.compiled for call in ways["padded to 32"]] == [1, 0, 0]
for short, long, fixed in zip(*ways.values()):
    assert long.result == fixed.result and long.result.startswith(short.result)

# %%
bars(ways, [f"prompt {number}" for number in (1, 2, 3)])

# %% [markdown]
# **What just happened.** All three write the same text. Growing compiles for each character. With the
# loop inside, each prompt is compiled once, because each has another length. Padded, the first
# prompt is slow, and the second and third find the program: look for a factor of some tens or
# hundreds between them.
# [The tutorial that this lab follows](https://huggingface.co/docs/transformers/v4.40.2/en/tf_xla)
# reports 30.8 s for the first prompt of a real language model, and 79 ms for the second and the third.
#
# The multiple is a compromise. A prompt of more than 32 characters takes a second program, and every
# character computes the padding as well. Few large steps compile rarely; many small ones compute
# less. (There is no cache of keys and values here: each character computes the whole buffer again.
# Lab 12 has a cache of fixed length.)

# %% [markdown]
# ## The same layer in both
#
# `relu(x @ weightᵀ + bias)`: a Keras `Dense` layer here, and `torch.nn.functional.linear` on
# torch_xla in a process of its own. The same numbers go in. What does XLA get, and what does it make
# of it?

# %%
from labs.jit_compile import keras_side

random = np.random.default_rng(0)
x, weight, bias = (random.normal(size=s).astype(np.float32) for s in ((4, 16), (8, 16), (8,)))
ours = [keras_side.keras_linear(x, weight, bias, dtype) for dtype in compare.DTYPES]
theirs = compare.torch_linears(x, weight, bias, compare.DTYPES)  # torch_xla's process
print("TensorFlow gives\n\n", ours[0].before.strip(), "\n\n", sep="")
print("torch_xla gives\n\n", theirs[0].before.strip(), sep="")

# %%
texts = {
    "TensorFlow gives": ours[0].before,
    "torch_xla gives": theirs[0].before,
    "TensorFlow compiled": ours[0].after,
    "torch_xla compiled": theirs[0].after,
}
counts = {name: compare.operations(text) for name, text in texts.items()}
print(compare.side_by_side(counts))
inside = [compare.fused(half[0].after) for half in (ours, theirs)]
print("\ninside the fusion:", dict(sorted(inside[0].items())))
apart = np.abs(ours[0].result - theirs[0].result).max()
print(f"results apart by at most {apart:.1e}")

assert counts["TensorFlow gives"] != counts["torch_xla gives"]
assert counts["TensorFlow compiled"] == counts["torch_xla compiled"]
assert inside[0] == inside[1] and apart < 1e-5

# %% [markdown]
# **What just happened.** The two say it differently. Keras keeps its weight as (in, out) and
# TensorFlow wraps arguments and results in reshapes that do nothing; PyTorch keeps (out, in), so
# torch_xla adds a transpose, and spreads the bias in two steps. The compiler removes all of that:
# from both comes one `dot` and one fusion with the same operations inside. What a framework costs is
# not in the program. It is in what happens around it, and that is the next section.
#
# And bfloat16? In Keras it is the layer's `dtype="mixed_bfloat16"`, in torch_xla `torch.autocast`:

# %%
import re

for name, half in (("TensorFlow", ours[1]), ("torch_xla", theirs[1])):
    types = [re.findall(r"= (\w+)\[\S* dot\(", text) for text in (half.before, half.after)]
    print(f"{name:<11} dot: given in {types[0][0]}, compiled for this CPU in {types[1][0]}")
    assert types[0] == ["bf16"]
apart = np.abs(ours[1].result - theirs[1].result).max()
print(f"results apart by at most {apart:.1e}")
assert apart < 0.1

# %% [markdown]
# Both hand over a product in bfloat16. What becomes of it is the device's affair: a TPU multiplies
# bfloat16, and XLA on a CPU may well convert back.

# %% [markdown]
# ## What carries over
#
# The same small experiments in both, each of them three calls. *Python* is how often Python ran the
# function's body, *XLA* how many programs were compiled, *run* how many were launched.

# %%
ours = keras_side.keras_experiments(programs)
theirs = compare.torch_experiments()  # torch_xla's process
print(compare.comparison(ours, theirs))

same = [name for name in ours if ours[name].compiled == theirs[name].compiled]
print("\nother programs in torch_xla:", *(name for name in ours if name not in same))

assert all(effort.python == 3 for effort in theirs.values())
assert ours["three shapes"].compiled == theirs["three shapes"].compiled == 3
assert ours["the same, padded"].compiled == theirs["the same, padded"].compiled == 1
assert (ours["x * number"].compiled, theirs["x * number"].compiled) == (3, 1)
assert (ours["a loop of 3 steps"].launched, theirs["a loop of 3 steps"].launched) == (1, 3)

# %%
tokens, length = generator.buffer(PROMPTS[0], NEW, 32)
text = padded.experimental_get_compiler_ir(tf.constant(tokens), tf.constant(length))("hlo")
[loop_line] = re.findall(r"(%\S+) = .* while\(", text)
print(f"the generator's program of {len(text.splitlines())} lines has one loop: {loop_line}")

# %% [markdown]
# **What just happened.** Read the table by columns.
#
# | | TensorFlow, `jit_compile` | torch_xla | carries over |
# |---|---|---|---|
# | a new shape | a new program | a new program | **yes**: static shapes, padding to a multiple |
# | a number that decides a shape | a new program for each value | a new program for each value | **yes**: mask instead of cutting |
# | a number as exponent | a new program for each value | a new program for each value | **yes**: pass a tensor |
# | a number as factor | a new program for each value | data | no: torch_xla uploads most numbers by itself |
# | Python | runs while a function is traced, then never | runs in **every** step, and traces it | no: a tracing count says nothing there; count compilations |
# | a loop | `for … in tf.range(…)` becomes a `while` in the program | Python repeats: a program for each sync, or all turns written out in one | no: torch_xla's loop over tokens is Python's |
# | state | `tf.Variable`, which the program reads and updates | parameters are inputs, updates are outputs, put in place | no |
# | what XLA does not have | an error | the host computes it, and nobody says so | no: look for `aten::` counters |
# | bfloat16 | `dtype="mixed_bfloat16"` | `torch.autocast` | **yes** |
# | `XLA_FLAGS=--xla_dump_to=…` | HLO before and after | HLO before and after | **yes**: it is how both halves were read here |
#
# That Python runs in every step is torch_xla's price, and its freedom: any `if` in your step is
# simply another graph. TensorFlow reads your Python once (that is *autograph*), and an `if` on a
# tensor becomes a part of the program.

# %% [markdown]
# ## Exercise
#
# How surprised is the generator by a text? `score` gives the mean loss of its characters, in nats.
# As it stands, it compiles for every length. **Fix it so that all texts of 34 to 64 characters take
# one program.** The mean is over the characters of the text, not over the padding.


# %% tags=["exercise"]
@tf.function(jit_compile=True)
def surprise(tokens):
    """Mean loss of all characters but the first: int32 (1, length) → float32 ()."""
    losses = keras.losses.sparse_categorical_crossentropy(
        tokens[:, 1:], model(tokens[:, :-1]), from_logits=True
    )
    return tf.reduce_mean(losses)


def score(text):
    """Mean loss of a text of at most 64 characters."""
    return float(surprise(tf.constant(generator.encode(text)[None])))  # fix this


for length in (40, 50, 60):
    print(f"{length} characters: {score(TEXT[:length]):.3f}")

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from random import sample

from course import checking


def reference(text):
    """The mean loss, without any compiler."""
    tokens = generator.encode(text)[None]
    losses = keras.losses.sparse_categorical_crossentropy(
        tokens[:, 1:], model(tokens[:, :-1]), from_logits=True
    )
    return float(tf.reduce_mean(losses))


with checking("One program for all of them, and the padding does not count.") as expect:
    texts = [TEXT[:length] for length in sample(range(34, 64), 4)]
    tried = programs.calls(lambda text: score(text), [(text,) for text in texts])
    expect(
        tried.compiled <= 1,
        f"{tried.compiled} programs for texts of {', '.join(str(len(t)) for t in texts)} "
        "characters; let all of them have one shape, and pass the length as a tensor",
    )
    for text in texts:
        expect(
            abs(score(text) - reference(text)) < 0.01,
            f"with {len(text)} characters the score is {score(text):.3f}; "
            f"the mean over its characters is {reference(text):.3f}",
        )


# %% tags=["solution"]
# @title Solution (open after trying)
@tf.function(jit_compile=True)
def masked_surprise(tokens, length):
    """Mean loss of the first ``length`` characters: int32 (1, room), int32 () → float32 ()."""
    losses = keras.losses.sparse_categorical_crossentropy(
        tokens[:, 1:], model(tokens[:, :-1]), from_logits=True
    )
    counts = tf.cast(tf.range(1, tokens.shape[1]) < length, tf.float32)
    return tf.reduce_sum(losses * counts) / tf.reduce_sum(counts)


def score(text):
    """Mean loss of a text of at most 64 characters."""
    tokens = generator.encode(text)
    room = -(-len(tokens) // 64) * 64
    padded_tokens = np.pad(tokens, (0, room - len(tokens)))[None]
    return float(masked_surprise(tf.constant(padded_tokens), tf.constant(len(tokens))))


for length in (40, 50, 60):
    scored = programs.call(score, TEXT[:length])
    print(f"{length} characters: {scored.result:.3f}, {scored.compiled} programs")
assert scored.compiled == 0

# %% [markdown] tags=["solution"]
# The shape is fixed, and the length is data: it is compared with positions and never cuts anything.
# Passing it as `len(tokens)` instead of `tf.constant(len(tokens))` would compile for each length
# again.

# %% [markdown]
# ## Recap
#
# * `tf.function(model, jit_compile=True)` compiles a model or any function as a whole; what XLA does
#   not have, or a shape that is computed, is an error.
# * `experimental_get_tracing_count` counts graphs; programs are counted by what `--xla_dump_to`
#   leaves. One graph can mean many programs.
# * With the loop inside and the prompt padded to a multiple, the first prompt waits for the compiler
#   and the others do not.
# * The same layer arrives at XLA in different words, and leaves it as the same program.
# * Static shapes, padding, tensors instead of numbers, bfloat16 and dump flags carry over; tracing
#   counts, loops in the graph, variables and errors do not.
#
# **Next:** this was the last lab. [GUIDE.md](../GUIDE.md) is for looking things up: what changes from
# GPU code, complete scripts, error messages and their fixes.
