# %% [markdown]
# # 12 · Text generation with static shapes
#
# **Generate text with a small language model, see XLA compile a program for every token, and bring it down
# to two programs for any text.**
#
# {{badges}}
#
# {{time: 35 min on v5e-1}}
#
# **You will be able to**
#
# * load a decoder on an XLA device, and say what goes wrong on the way there;
# * count what a generation loop compiles, and cure it by padding and by a cache of fixed length;
# * place `torch_xla.sync()`, and count what a stop condition costs in host reads;
# * make generation repeat, sample, and write a batch that equals its single texts;
# * compare host and device layer by layer, and choose a debugging variable;
# * say which 8-bit weights work on torch_xla today, and what they save.
#
# **You need** lesson 07 (the report, and why a shape compiles again). Any runtime: the counts are
# the same on a TPU and without one.

# %% [markdown]
# ## Setup
#
# The lab takes its model from **transformers 5.23.0**, which is installed if this runtime has another
# version or none. Nothing else is installed, and nothing is downloaded: the model is
# built here and learns from a text of ours. torch and torch_xla stay as they are.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("mshnet") is None:  # a fresh Colab or Kaggle session
    # --no-deps: the runtime's torch and torch_xla belong together and stay as they are.
    package = "git+{{repository}}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", package], check=True)

# %%
from course import checkout, install

install("transformers==5.23.0")
sys.path.insert(0, str(checkout()))  # labs/ lies beside the package

# %%
import os

from tpuscope.engine import torch_xla as runtime

TPU = runtime.tpu_chips() > 0
SMALL = not TPU  # a narrow model where the CPU does the work

if not TPU:
    os.environ["PJRT_DEVICE"] = "CPU"  # XLA on the CPU; must be set before the device is opened

HIDDEN = 64 if SMALL else 256  # width of the model
TOKENS = 20  # to be written for each prompt

# %%
import torch
import torch_xla
from torch_xla.backends import set_mat_mul_precision

from labs.text_generation import bits, decoder, look, ways
from tpuscope import aot, track, watch
from tpuscope.engine import lazy_graph

if TPU:  # it multiplies float32 in bfloat16 unless the precision is set, and then two ways to the
    # same logits differ in the third digit, and now and then in a token
    set_mat_mul_precision("highest")
device = torch_xla.device()
print(runtime.describe())

# %% [markdown]
# ## A decoder of our own
#
# Two blocks of a Llama, with a vocabulary that needs no file: the 256 bytes. Byte 0 is padding, the
# end of a line ends a text. It learns 21 sentences by heart, on the device, all of them in every
# step.

# %%
print(decoder.TEXT.splitlines()[:3], "…")
model = decoder.move(decoder.build(HIDDEN), device)
with watch(explain=False) as w:
    losses = decoder.train(model)
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at the end, nats a byte")
print(w.report())

assert w.report().compilations <= 2 and w.report().fallbacks == 0 and losses[-1] < 0.5

# %% [markdown]
# **What just happened.** All steps are two programs (AdamW makes its state in the first step,
# lesson 07), and one read for each loss, after the last step.
#
# ## Loading it
#
# To a folder and back, as every model of transformers goes, with `save_pretrained` and
# `from_pretrained`. Two things are different with an XLA device. Both are hidden in `decoder.save` and
# `decoder.load`; here they are in the open.

# %%
import tempfile
import warnings

FOLDER = tempfile.mkdtemp(prefix="decoder-")

try:
    with warnings.catch_warnings(action="ignore"):  # safetensors asks in two ways, one is old
        model.save_pretrained(FOLDER)
    refused = ""
except RuntimeError as error:
    refused = str(error)
print("saved from the device:", refused)

fresh = decoder.build(HIDDEN)
before = fresh.lm_head.weight is fresh.model.embed_tokens.weight
fresh.to(device)
after = fresh.lm_head.weight is fresh.model.embed_tokens.weight
fresh.tie_weights()
again = fresh.lm_head.weight is fresh.model.embed_tokens.weight
print(
    f"shared weights: {before} on the host, {after} after .to(device), {again} after tie_weights()"
)

decoder.save(model, FOLDER)
model = decoder.load(FOLDER, device)
host = decoder.load(FOLDER, torch.device("cpu"))

assert "invalid python storage" in refused
assert (before, after, again) == (True, False, True)

# %% [markdown]
# **What just happened.** safetensors needs to know where a tensor lies, and an XLA tensor cannot
# say: **save from the host**. And the input embedding and the output layer of this model are one
# tensor. `.to(device)` silently makes two of it; training would continue with two that drift
# apart. **Call `tie_weights()` after `.to()`**.
#
# ## The first attempt: `model.generate`
#
# The loop that everybody uses, for four tokens.

# %%
from transformers import StoppingCriteria, StoppingCriteriaList

ids = ways.left_padded(["The target "])


class Sync(StoppingCriteria):
    """Asked after every token; it ends the step and stops nothing."""

    def __call__(self, input_ids, scores, **unused):
        torch_xla.sync()
        return torch.zeros(len(input_ids), dtype=torch.bool).to(input_ids.device)


def attempt(**options):
    """Four tokens by transformers' own loop; the report."""
    given = ids.to(device)
    with watch() as w:
        model.generate(
            given, attention_mask=given != 0, max_new_tokens=4, do_sample=False, **options
        )
        torch_xla.sync()
    return w.report()


plain = attempt()
static = attempt(cache_implementation="static")
synced = attempt(
    cache_implementation="static",
    eos_token_id=None,
    stopping_criteria=StoppingCriteriaList([Sync()]),
)
print(plain, "\n")
attempts = {"generate()": plain, "static cache": static, "static, sync, no end": synced}
for name, report in attempts.items():
    print(
        f"{name:<22}{report.compilations:>3} compilations  "
        f"{report.counts.compile_seconds:>5.1f} s  "
        f"{report.host_reads:>2} reads  {report.fallbacks:>2} fallbacks"
    )

assert plain.compilations > 4 and static.compilations >= 4 and synced.compilations >= 4
assert min(report.host_reads for report in attempts.values()) >= 4
assert TPU or plain.fallbacks > 0

# %% [markdown]
# **What just happened.** For each token at least one program, with and without a static cache. Three
# reasons:
#
# * **The shapes grow.** `generate` keeps the text in `input_ids` and its mask beside it, and appends
#   to both. `cache_implementation="static"` fixes the keys and values, and not those.
# * **Nothing ends a step.** transformers calls no `torch_xla.sync()`. Only reads and fallbacks cut
#   the graph, and a program that was cut computes what the read needs and keeps nothing else. So the
#   next one begins further back, and each takes longer to compile than the one before.
# * **The host asks.** Whether to stop is read after every token; `torch.isin`, which looks for
#   the end, has no XLA version.
#
# `StoppingCriteria` is the hook that is called after every token, and so a place for a sync. It ends
# the second trouble. The first and the third stay. So the loop is ours from here on:

# %%
import inspect

print(inspect.getsource(ways.generate).split('"""')[2])

# %% [markdown]
# Everything that changes from token to token is a tensor: the text, which rows have ended, the
# temperature. The loop ends its step, and reads once, after the last token. `way` is what will
# differ: how the logits of the next token come about.
#
# ## One: the text grows

# %%
PROMPTS = ["The target ", "A program is ", "Padding "]

growing = look.measure(ways.Growing(model), PROMPTS, TOKENS)
print(look.table(growing))
for run in growing:
    print(run.text)

assert [run.report.compilations for run in growing] == [TOKENS, 2, 3]
assert all(run.report.host_reads == 1 for run in growing)

# %% [markdown]
# **What just happened.** A program for each token. The second prompt is two bytes longer than the
# first, so only its last two lengths are new; the third is three bytes shorter. Whoever measures with
# one prompt several times sees a fast model, and its users do not.
#
# ## Two: padded to a multiple
#
# The model sees 16, 32, 48 … columns. The text stands at the right end, zeros to its left, and a mask
# and position numbers say so.

# %%
padded = look.measure(ways.Padded(model, capacity=64, multiple=16), PROMPTS, TOKENS)
print(look.table(padded))

assert [run.report.compilations for run in padded] == [2, 0, 0]
assert [run.text for run in padded] == [run.text for run in growing]

# %% [markdown]
# **What just happened.** Two programs: for 16 columns and for 32. Then none, for any prompt that
# stays below. The padded columns are computed for nothing, which is cheap against a compilation.
#
# ## Three: a static KV cache
#
# Still the whole text is computed for every token. A KV cache keeps the keys and values of earlier
# tokens, and its length is fixed in advance. Then there are two programs: the *prefill* of the prompt,
# padded to a multiple, and the *decode step* of one token.

# %%
static = look.measure(ways.Static(model, capacity=64, multiple=16), PROMPTS, TOKENS)
print(look.table(static))

assert [run.report.compilations for run in static] == [2, 0, 0]
assert [run.text for run in static] == [run.text for run in growing]

# %% [markdown]
# **What just happened.** The same texts, two programs. The cache is transformers' own `StaticCache`,
# and under torch_xla 2.9 it does what its name says: its fill level is a tensor, so *where* the next
# keys are written is data. A fill level that is a Python number would be a constant of the program,
# and each token would compile again.
#
# All three ways, token by token:

# %%
look.time_per_token([*growing, *padded, *static])

# %% [markdown]
# **What just happened.** On a logarithmic scale: growing pays for a compilation with every token, the
# others have paid after the first prompt. With a model this small the cache saves no time over
# padding: the arithmetic is nothing, and what is left is the host, which traces every operation
# of the model for every token.
#
# ## What is left is the host

# %%
way = ways.Compiled(model, capacity=64, multiple=16)
compiled = look.measure(way, PROMPTS, TOKENS)
print(look.table([*static[1:], *compiled[1:]]))

written = {}
for run in (static[-1], compiled[-1]):
    counters = run.report.counts.counters
    operations = sum(n for name, n in counters.items() if name.startswith("xla::"))
    written[run.way] = operations / TOKENS
    print(f"{run.way:<10}{written[run.way]:>6.1f} operations traced for each token")

assert [run.text for run in compiled] == [run.text for run in static]
assert [run.report.compilations for run in compiled[1:]] == [0, 0]
assert way.fallback_reason is None and written["compiled"] < written["static"] / 3

# %% [markdown]
# **What just happened.** `tpuscope.CompiledStep` traces the decode step twice, sees that
# both are the same program, and from then on calls it with the present cache. It is possible because
# nothing in the step is a Python number. The choice of the token stays outside, a small program of its own;
# it is still traced, and so is the prefill.
#
# ## Where to sync
#
# Older code calls `xm.mark_step()`, today's name is `torch_xla.sync()`. A test bench for language
# models has it in three places:
#
# | after | why |
# |---|---|
# | each token | the program of a token is the same as that of the next |
# | a clean-up of memory | what is pending holds on to its inputs, deleted or not |
# | a batch | the next batch's graph begins with the next batch |
#
# The first two can be seen in the pending graph:


# %%
def pending(tokens, sync):
    """Instructions that wait after each token."""
    way = ways.Static(model)
    way.begin(ways.left_padded(["The target "], 16))
    sizes = []
    for _ in range(tokens):
        with torch.no_grad():
            token = ways.choose(way.logits())
            way.append(token)
        sizes.append(lazy_graph.hlo([token]).count(" = "))
        if sync:
            torch_xla.sync()
    torch_xla.sync()
    return sizes


print("with a sync after each token   ", with_sync := pending(4, sync=True))
print("with none                      ", without := pending(4, sync=False))

large = torch.zeros(1024, 1024).to(device)
total = large.sum()
del large
held = "f32[1024,1024]" in lazy_graph.hlo([total])
torch_xla.sync()
let_go = "f32[1024,1024]" not in lazy_graph.hlo([total])
print(f"a deleted tensor is held by what is pending: {held}; let go by the sync: {let_go}")

assert with_sync[1] == with_sync[2] == with_sync[3]
assert without[1] < without[2] < without[3]
assert held and let_go

# %% [markdown]
# **What just happened.** Without a sync each token's program holds all tokens before it. With one,
# every token after the prefill is the same program. And a tensor that Python has deleted lives on as
# an input of what is pending, so `del cache` frees memory only together with a sync. At the end of a
# batch the read of the texts is itself an end: it waits for what it needs.
#
# ## The stop condition
#
# Has every row written its end? That is a value of the device, and the host waits for it.

# %%
way = ways.Static(model)
for every in (1, 8, 0):
    with watch(explain=False) as w:
        [text] = ways.generate(way, ["A program is "], 32, stop_every=every)
    report = w.report()
    when = f"asked every {every}" if every else "never asked"
    print(
        f"{when:<16}{len(report.steps):>2} tokens  {report.host_reads:>2} reads  "
        f"{report.seconds:.2f} s  {text!r}"
    )
    assert report.compilations == 0
    assert report.host_reads == 1 + (len(report.steps) // every if every else 0)

# %% [markdown]
# **What just happened.** Asked after every token: as many reads as tokens, and one for the text. Asked
# every eighth: a few, and at most seven tokens too many, which are padding (a row that has ended
# writes nothing else). Never asked: one read, and all 32 tokens. The text is the same each time.
#
# Other reads are not in your code. transformers looks at masks to find out what it can leave out:

# %%
batch = ways.left_padded(PROMPTS, 16)
for attention in ("eager", "sdpa"):
    model.set_attn_implementation(attention)
    for given in ("mask", "no mask"):
        there = batch.to(device)
        mask = {"attention_mask": there != 0} if given == "mask" else {}
        with torch.no_grad(), watch(explain=False) as w:
            model(input_ids=there, use_cache=False, **mask)
            torch_xla.sync()
        print(f"{attention:<6}{given:<8} {w.report().host_reads} reads in a forward pass")
        assert (w.report().host_reads == 0) == (attention == "eager" and given == "mask")
model.set_attn_implementation("eager")

# %% [markdown]
# **What just happened.** Without a mask it looks for several samples packed into one row; with `sdpa`
# it looks whether the mask masks anything. Only `attn_implementation="eager"` with a mask reads
# nothing. It is what `decoder.build` and `decoder.load` choose.
#
# ## Greedy, sampling, and the same again
#
# Greedy takes the most probable token. Sampling draws, and the random numbers are the device's own.


# %%
def sample(seed, host_seed=0, temperature=0.8):
    """Three continuations of one prompt."""
    torch.manual_seed(host_seed)
    torch_xla.manual_seed(seed)
    return ways.generate(way, ["The "] * 3, 32, temperature)


first = sample(seed=1)
print(*first, sep="\n")
print("same seed of the device, other seed of the host:", sample(seed=1, host_seed=7) == first)
print("other seed of the device:", sample(seed=2) == first)
print("at a temperature of 1.3:", *sample(seed=1, temperature=1.3), sep="\n")

with watch(explain=False) as w:
    sample(seed=3, temperature=0.31)
assert sample(seed=1, host_seed=7) == first != sample(seed=2)
assert w.report().compilations == 0

# %% [markdown]
# **What just happened.** `torch_xla.manual_seed` makes it repeat; `torch.manual_seed` alone does not
# touch the device. The seed is data of the program, and so is the temperature, since `generate`
# uploads it: another one compiles nothing.
#
# ## A batch equals its texts
#
# Three prompts of different lengths in one batch. Padding on the left lets them end together, so the
# next token comes after the last column, in all rows.

# %%
together = ways.generate(way, PROMPTS, TOKENS)
alone = [ways.generate(way, [prompt], TOKENS)[0] for prompt in PROMPTS]
for one, other in zip(together, alone):
    print(f"{one!r:<36}{other!r}")

assert together == alone

# %% [markdown]
# It takes a mask, and for some models positions. A Llama and a GPT-2 with random weights, on the host:
# how far are the logits of a padded row from those of the row by itself?

# %%
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=10,
        attn_implementation="eager",
    )
).eval()
row, rows = ways.left_padded(PROMPTS[:1]), ways.left_padded(PROMPTS, 16)
mask = rows != 0
off = {}
for name, network in {"Llama": decoder.build(64), "GPT-2": gpt2}.items():
    with torch.no_grad():
        right = network(input_ids=row).logits[0, -1]
        for what, given in {
            "mask and positions": {"attention_mask": mask, "position_ids": ways.positions(mask)},
            "mask": {"attention_mask": mask},
            "nothing": {},
        }.items():
            logits = network(input_ids=rows, use_cache=False, **given).logits[0, -1]
            off[name, what] = float((logits - right).abs().max() / right.abs().max())
            print(f"{name}  given {what:<20}off by {100 * off[name, what]:.4f} %")

assert off["Llama", "mask"] < 1e-5 < 1e-2 < off["GPT-2", "mask"]
assert off["Llama", "mask and positions"] < 1e-5 and off["GPT-2", "mask and positions"] < 1e-5

# %% [markdown]
# **What just happened.** Without a mask both read the padding. With a mask the Llama is right, because
# its rotary positions only know distances. GPT-2 has learned a vector for each position and needs the
# numbers, counted from the first real token.
#
# ## Host against device, layer by layer
#
# When a text on the device is another one than on the host, the first question is where they part.

# %%
differ = look.differences(
    look.hidden_states(host, batch), look.hidden_states(model, batch), batch != 0
)
for name, value in differ.items():
    print(f"{name:<16}{value:.1e}")

assert max(differ.values()) < (1e-3 if TPU else 1e-5)

# %% [markdown]
# **What just happened.** Nothing in the embedding, which is a look-up; rounding in the blocks. A
# wrong layer would stand out: everything before it is equal, everything after it is not.
#
# The other question is what was computed. The tracker of lesson 09 gives each operation to its layer;
# here over one block, on the host and on the device.

# %%
inputs = torch.randn(2, 8, HIDDEN)
angles = host.model.rotary_emb(inputs, torch.arange(8)[None])
arguments = (inputs, torch.zeros(1, 1, 8, 8), None, None, False, angles)
with torch.no_grad():
    here, there = (
        track(network.model.layers[0], *arguments, backward=False) for network in (host, model)
    )
print(there.table(), "\n")
print(look.operations(here, there))

assert not there.total().on_host and here.total().flops == there.total().flops

# %% [markdown]
# **What just happened.** The same layers, the same flops, no operation left to the host. What differs
# is in the attention: copies that the host makes to bring heads into order. XLA decides itself
# how a tensor lies in memory, so there they are not asked for. *HLO* is how many instructions the
# compiler gets for a layer.
#
# ## Debugging variables
#
# They have to be set before torch_xla is imported. So each is tried in a process of its own, on the
# same little loop.

# %%
LOOP = """
import torch, torch_xla

device = torch_xla.device()
table, out = torch.randn(256, 64).to(device), torch.randn(64, 256).to(device)
ids = torch.tensor([[65, 66, 67]]).to(device)
for _ in range(2):
    token = (table[ids].mean(1) @ out).argmax(-1, keepdim=True)
    text = torch_xla._XLAC._get_xla_tensors_text([token])
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([token])
    ids = torch.cat([ids, token], 1)
    torch_xla.sync()
print("IR:", text)
print("HLO:", hlo)
"""


def elsewhere(variables):
    """What the loop prints, with variables, in a process of its own on the CPU."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        env=clean | {"PJRT_DEVICE": "CPU"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


# %%
from concurrent.futures import ThreadPoolExecutor

SETTINGS = [
    {"XLA_IR_DEBUG": "1"},
    {"XLA_HLO_DEBUG": "1"},
    {"PT_XLA_DEBUG_LEVEL": "1"},
    {"PT_XLA_DEBUG_LEVEL": "2"},
]
with ThreadPoolExecutor(2) as pool:
    said = list(pool.map(elsewhere, SETTINGS))

seen = []
for setting, text in zip(SETTINGS, said):
    [name] = [f"{key}={value}" for key, value in setting.items()]
    seen.append(
        {
            "lines in graph": text.count("location="),
            "in HLO": text.count("source_line="),
            "compilations explained": text.count("Compilation Cause"),
            "executions": text.count("Execution Cause"),
        }
    )
    print(f"{name:<22}", ", ".join(f"{count} {what}" for what, count in seen[-1].items()))

line = next(line for line in said[0].splitlines() if "argmax" in line)
instruction = next(line for line in said[1].splitlines() if "source_line=" in line)
print(line.strip(), instruction.strip(), sep="\n")
start = said[2].index("Compilation Analysis: Compilation Cause")
print(*said[2][start:].splitlines()[:6], sep="\n")

ir, hlo, level1, level2 = seen
assert ir["lines in graph"] and hlo["in HLO"] and not ir["compilations explained"]
assert level1["compilations explained"] == 2 and not level1["lines in graph"]
assert level1["executions"] == 0 and level2["executions"] >= 2

# %% [markdown]
# **What just happened.**
#
# | variable | shows | use it to |
# |---|---|---|
# | `XLA_IR_DEBUG=1` | the Python line of each operation, in the pending graph | find who wrote it |
# | `XLA_HLO_DEBUG=1` | the same, in the HLO that the compiler gets | find it in a program |
# | `PT_XLA_DEBUG_LEVEL=1` | for each compilation: cause, line, graph hash | see what compiles |
# | `PT_XLA_DEBUG_LEVEL=2` | for each execution, too | see what cut the graph |
#
# In torch_xla 2.9.0 each of the first two does the work of both, as the counts show. They make
# tracing slower, since every operation looks at the Python stack. Avoid that in a loop that is
# bound by tracing. Set them for one run, then take them away.
#
# ## Fewer bits
#
# A decode step reads every weight for one token. So it is bound by memory, and weights of 8 bits
# should help. What of that works on torch_xla 2.9? Everything that is offered is tried here on one
# small product, and held against float32 on the host.

# %%
tried = bits.trials(device)
for trial in tried:
    print(f"{trial.outcome:<13}{trial.name:<42}{trial.detail[:80]}")

outcome = {trial.name: trial.outcome for trial in tried}
assert outcome["int8 weights, converted in the program"] == "works"
assert outcome["FP8 weights (e4m3fn), converted"] == "works"
assert outcome["XlaQuantizedLinear, int8"] == "works"
assert TPU or outcome["int8 × int8"] == "wrong"
assert TPU or outcome["quantize_dynamic, then .to(device)"] == "on the host"

# %% [markdown]
# **What just happened.**
#
# * **Weights stored in 8 bits and converted in the program work**, int8 and FP8 (`float8_e4m3fn`,
#   `float8_e5m2`), without a fallback. `XlaQuantizedLinear`, torch_xla's own, is the same with int8.
# * **A product of two int8 tensors is int8**, and overflows silently. A product of two FP8
#   tensors is FP8, with three bits of fraction: the number is right, and rough.
# * **What PyTorch has for this on CUDA goes to the host**: `torch._scaled_mm`, `torch._int_mm`.
# * **`quantize_dynamic` seems to work.** Its weights stay on the host, `.to(device)` does not move
#   them, and every call fetches its input. The counter is `quantized::linear_dynamic`, not `aten::`.
# * **Quantised tensors**, the `fnuz` kind of FP8 and, on XLA's CPU, int4 are refused.
#
# The outcomes on a TPU can be others where a compiler has the last word (int4).
#
# The decoder with its blocks in 8 bits:

# %%
for name, dtype in {"int8": torch.int8, "FP8": bits.FP8}.items():
    eight = decoder.move(bits.quantised(host, dtype), device)
    with watch(explain=False) as w:
        texts = ways.generate(ways.Static(eight), PROMPTS, TOKENS)
    report = w.report()
    print(f"{name:<5}{report.compilations} compilations, {report.fallbacks} fallbacks", texts)
    assert report.compilations == 2 and report.fallbacks == 0

# %% [markdown]
# And what would it save on a TPU? XLA on the CPU cannot tell. The TPU's compiler can, without a TPU
# (lesson 09): the decode step of a wider model, compiled ahead of time for a v5e.

# %%
aot.require_compiler()
wide = decoder.build(hidden=512, layers=1)
reports = {}
for name, network in {"float32": wide, "int8": bits.quantised(wide)}.items():
    way = ways.Static(decoder.move(network, device))
    with torch.no_grad():
        way.begin(ways.left_padded(["The target "], 16))
        way.append(ways.choose(way.logits()))
        torch_xla.sync()

        def step(token, way=way):
            way.append(token)
            return way.logits()

        reports[name] = aot.compile(step, [torch.tensor([[65]])], topology="v5e:1x1")
    torch_xla.sync()
    report = reports[name]
    print(
        f"{name:<8}{report.bytes_accessed / 1e6:>6.1f} MB moved, bound by {report.bound}, "
        f"at least {1e6 * report.roofline_seconds:.0f} µs a token"
    )

assert reports["float32"].bound == "memory"
assert reports["int8"].bytes_accessed < 0.6 * reports["float32"].bytes_accessed

# %% [markdown]
# **What just happened.** The compiler reads the int8 weights and converts them on the way: less than
# half of the bytes, and the bound falls with them. The embedding and the output layer are still
# float32 here. It is a bound, not a time.
#
# ## Wrong requests
#
# Each gives one line that names the value and the fix.

# %%
from tpuscope.errors import RequestError

wrong = {
    "prompt longer than the cache": lambda: ways.generate(way, ["The target " * 9], 4),
    "empty prompt": lambda: ways.generate(way, [""], 4),
    "multiple": lambda: ways.Padded(model, multiple=0),
    "temperature": lambda: ways.generate(way, ["The "], 4, temperature=0),
    "no model there": lambda: decoder.load("nowhere", device),
}
for name, request in wrong.items():
    try:
        request()
        raise AssertionError(f"{name} was accepted")
    except RequestError as error:
        print(f"{name}: {error}")
        assert "\n" not in str(error)

# %% [markdown]
# ## Exercise
#
# A repetition penalty makes tokens less likely that the text has already: their logits are divided
# by a factor if positive, and multiplied if negative. Below is a version as found in the wild. It
# reads the text after every token, and compiles again whenever the set of tokens grows. **Fix
# `penalised` so that the loop compiles two programs and reads nothing.** (Padding, token 0, counts
# as a token here.)


# %% tags=["exercise"]
def penalised(logits, ids, factor=1.3):
    """Logits (1, 256) and the text (1, capacity), both on the device; the new logits."""
    for token in set(ids[0].tolist()):  # fix this
        value = logits[0, token]
        logits[0, token] = torch.where(value > 0, value / factor, value * factor)
    return logits


def write(tokens, prompt="The sensor "):
    """A text with the penalty, and the report."""
    way = ways.Static(model)
    with torch.no_grad(), watch(explain=False) as w:
        way.begin(ways.left_padded([prompt], 16))
        for _ in range(tokens):
            way.append(ways.choose(penalised(way.logits(), way.ids)))
            torch_xla.sync()
    return decoder.decode(way.ids[0].tolist()), w.report()


text, report = write(4)
print(text, report, sep="\n")

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking


def expected(logits, ids, factor):
    """On the host."""
    new = logits.clone()
    for token in set(ids[0].tolist()):
        value = new[0, token]
        new[0, token] = value / factor if value > 0 else value * factor
    return new


with checking("Two programs, and nothing read.") as expect:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1, 256, generator=generator)
    text_ids = torch.randint(0, 256, (1, 64), generator=generator)
    for factor in (1.3, 2.0):
        found = penalised(values.clone().to(device), text_ids.to(device), factor).cpu()
        error = float((found - expected(values, text_ids, factor)).abs().max())
        expect(error < 1e-3, f"with factor {factor} a logit is off by {error:.3f}")
    _, report = write(6)
    expect(
        report.host_reads == 0,
        f"{report.host_reads} host reads in six tokens: which tokens the text has must stay on the "
        "device",
    )
    expect(report.compilations <= 2, f"{report.compilations} compilations in six tokens, not 2")


# %% tags=["solution"]
# @title Solution (open after trying)
def penalised(logits, ids, factor=1.3):
    """Which tokens the text has is a row of 256 flags, whatever their number."""
    has = torch.zeros_like(logits).scatter(1, ids, 1.0) > 0
    return torch.where(has, torch.where(logits > 0, logits / factor, logits * factor), logits)


text, report = write(TOKENS)
print(text, report, sep="\n")
assert report.compilations <= 2 and report.host_reads == 0

# %% [markdown] tags=["solution"]
# A set has a length that changes. A row of flags, one for each token of the vocabulary, carries the
# same information in a shape that stays. `scatter` writes all flags at once. Most of such cures look
# like this: a list becomes a mask.

# %% [markdown]
# ## Recap
#
# * Save from the host, `tie_weights()` after `.to(device)`, `attn_implementation="eager"` with a mask.
# * Growing text compiles for each token, padding for each multiple, a static cache twice;
#   `model.generate` does so for each token even with a static cache.
# * `torch_xla.sync()` after each token, clean-up and batch; ask whether to stop every few tokens.
# * `torch_xla.manual_seed` makes sampling repeat; left padding, a mask and positions make a batch
#   equal its texts.
# * `look.differences` finds the layer, `track` its operations; `XLA_IR_DEBUG`,
#   `XLA_HLO_DEBUG` and `PT_XLA_DEBUG_LEVEL` name lines, for one run.
# * 8-bit weights that are converted in the program work and save most of the bytes; products of
#   int8 overflow, and what PyTorch offers for CUDA or CPU runs on the host.
#
# **Next:** lab 13, TensorFlow's jit_compile.
