# %% [markdown]
# # 09 · Compile for a TPU you do not have
#
# **Will it fit in memory, and what will limit it? Ask the TPU's own compiler, before you book a TPU.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * compile a training step for v5e, v6e or eight cores on a machine without a TPU;
# * read what it needs: memory, bytes moved, operations, and the least time that follows;
# * say where padding comes from, and which batch fills the tiles;
# * count what eight cores exchange in a step;
# * ask all this of a model of your own, layer by layer, and know what the answer leaves out.
#
# **You need** lesson 04, and no TPU. Colab's TPU runtime has all that is needed; elsewhere it takes
# Linux and `pip install "mshnet[aot] @ git+{{repository}}"`.

# %% [markdown]
# ## Setup

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("mshnet") is None:  # a fresh Colab or Kaggle session
    # --no-deps: the runtime's torch, torch_xla, jax and libtpu belong together and stay as they are.
    package = "git+{{repository}}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", package], check=True)

# %%
import os
import tempfile
from importlib import metadata
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"  # steps are traced on the CPU: a TPU, if there is one, stays free

from tpuscope import aot
from tpuscope.engine import torch_xla as runtime

aot.require_compiler()  # says what to install, if it is missing
WORK = Path(tempfile.mkdtemp(prefix="aot-"))
for name in ("torch", "torch_xla", "jax", "libtpu"):
    print(f"{name:<10}{metadata.version(name)}")

# %% [markdown]
# ## A compiler needs no machine
#
# A TPU runs programs, and **libtpu** is what makes them: an ordinary library with the whole
# compiler in it. It runs on any Linux machine, and compiles for every generation from v2 to v6e.
# Only *running* the program takes the chip.
#
# So the question "will batch 64 fit?" takes no booking:
#
# 1. torch_xla traces the step, as in lesson 04, and gives it away as **StableHLO**, the form of a
#    program that all XLA compilers read;
# 2. libtpu compiles it for the slice that you name;
# 3. the compiled program reports what it needs.
#
# `tpuscope.aot` (ahead of time) does the three. jax is there only to hand the program to libtpu,
# and both run in their own process, separate from your model's.

# %% [markdown]
# ## One step, compiled
#
# A small model, so that it takes seconds. Nothing about the step is special: it is the one that
# you would run. It only must not call `torch_xla.sync()`, because the program ends where the step
# does.

# %%
import torch
from torch import nn

device = runtime.device()


class Small(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images):
        return self.head(self.features(images))


def training(batch, width=16, size=64):
    """A training step, and its inputs."""
    model = Small(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(images):
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, [torch.zeros(batch, 3, size, size)]


step, inputs = training(batch=8)
report = aot.compile(step, inputs, topology="v5e:1x1")
print(report.table(depth=3, rows=6))

# %% [markdown]
# **What just happened.** The step was traced and not computed, and a compiler for a chip that this
# machine does not need reported what the program needs there. From top to bottom:
#
# * **memory**: arguments (inputs, parameters, batch norm's statistics), temporaries, results, the
#   program itself. Parameters that are updated in place count once. `fits` compares the sum with
#   what a v5e leaves to programs: 15.75 of its 16 GiB.
# * **moved**: bytes that travel between HBM, the chip's main memory, and the core. A fused group of
#   operations reads its inputs once and writes its results once; what happens in between stays on
#   the core.
# * **at least**: the *roofline*. The chip can do so many operations a second and move so many bytes
#   a second, both published (`tpuscope.engine.tpu_specs`). Whichever takes longer is the bound. **No step
#   is faster; many are slower.**
# * **cycles** are the compiler's own estimate for each instruction. They tell layers apart; they
#   are not a time.
#
# This step is bound by memory, and so is MSHNet's. Which is why the next word matters: *padding*.

# %% [markdown]
# ## Tiles
#
# A TPU's vector unit works on tiles of 8 × 128 numbers: 8 sublanes of 128 lanes. An array in HBM
# is kept in such tiles, and what does not fill one is padding, which is stored and moved like
# everything else. The layout says which axes lie in the tile:
#
# ```
# f32[8,16,64,64]{1,0,3,2:T(8,128)}
# ```
#
# are 8 images of 16 channels, 64 rows and 64 columns: axes 0 to 3. The braces name the axes from the
# fastest to the slowest: axis 1, the channels, lies in the 128 lanes, axis 0, the images, in the 8
# sublanes, and then come columns and rows.
#
# 16 channels in 128 lanes: seven eighths of the array are padding. The compiler may turn it around
# and put the batch into the lanes, and does so where that is better. The largest arrays of our step:

# %%
for buffer in report.buffers[:4]:
    factor = buffer["bytes"] / buffer["unpadded_bytes"]
    print(f"{buffer['shape']:<38}{factor:>5.1f}×  {buffer['operation']}")
print(f"\nall that is moved: {report.padding:.1f} times what the arrays hold")
assert report.padding > 2

# %% [markdown]
# `tpuscope.aot.hlo` does that arithmetic for any layout. How full are the lanes when the batch lies
# there?

# %%
from tpuscope.aot import hlo

for batch in (4, 8, 32, 64, 100, 128, 256):
    [array] = hlo.arrays(f"bf16[{batch},16,256,256]{{0,1,3,2:T(8,128)(2,1)}}")
    print(f"batch {batch:>3}: {array.size / array.unpadded:>5.1f} times the memory that it fills")

# %% [markdown]
# **What just happened.** A batch of 4 in 128 lanes takes 32 times the memory and 32 times the
# bandwidth. A batch of 100 is padded to 128. That is why the guide says to fill the lanes.

# %% [markdown]
# ## Bytes an image against the batch
#
# Live, for the small model:

# %%
BATCHES = (8, 32, 128)
curve = {}
for batch in BATCHES:
    curve[batch] = aot.compile(*training(batch), topology="v5e:1x1")
    print(
        f"batch {batch:>3}: {curve[batch].bytes_accessed / batch / 1e6:>6.1f} MB an image, "
        f"padding {curve[batch].padding:.1f}×, at least {1e3 * curve[batch].roofline_seconds:.2f} ms"
    )

# %%
import matplotlib.pyplot as plt

_, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
moved = [curve[batch].bytes_accessed / batch / 1e6 for batch in BATCHES]
held = [m / curve[batch].padding for m, batch in zip(moved, BATCHES)]
axis.plot(BATCHES, moved, "o-", color="#ff453a", label="moved")
axis.plot(BATCHES, held, "o-", color="#0a84ff", label="without padding")
axis.set_xscale("log", base=2)
axis.set(xlabel="batch", ylabel="MB an image", xticks=BATCHES, ylim=(0, None))
axis.set_xticklabels(BATCHES)
axis.legend()
plt.show()
assert moved[0] > 2 * moved[-1]

# %% [markdown]
# **What just happened.** The work of an image is the same, the bytes are not: a full batch moves a
# fraction of what a small one moves for each image, and sixteen times the images have a bound that
# is hardly higher.
#
# The real network behaves the same way, if it is written as for any device. Compiled by us for a
# v5e, MSHNet at 256×256 moves so many GB an image, with
# `mshnet aot --topology v5e:1x1 --precision bf16 --batch-size N --space-to-depth 0`, and without `--space-to-depth 0`:
#
# | batch | bf16, as for any device | bf16, as for a TPU | fp32, as for any device | fp32, as for a TPU |
# |---|---|---|---|---|
# | 4 | 4.5 | 1.5 | 7.1 | 3.0 |
# | 8 | 4.7 | 1.2 | 8.3 | 2.3 |
# | 32 | 2.4 | 0.94 | 4.2 | 1.8 |
# | 128 | 0.79 | 0.56 | 1.4 | 1.0 |
#
# *As for a TPU* is `mshnet/model_tpu.py`, with the same parameters and the same numbers up to rounding;
# it is the default on a TPU. Below 128 images it moves eight columns of a map
# into channels (space-to-depth), so that 16 channels become 128 and fill the lanes with any batch, for four times
# the arithmetic, which the chip has to spare. And it looks at every map less often: sums that two
# layers take of the same map are taken together. The batch matters less then, and it still does:
# eight cores with 4 images each move 1.6 times the bytes of one core with 32, so they need not be
# eight times faster.
#
# Larger batches also train differently (fewer updates an epoch), so this is an offer, not a rule.

# %% [markdown]
# ## Will batch 64 fit my Colab v5e?
#
# That is one command, and `--sweep` looks for the largest batch that does:
#
# ```
# mshnet aot --topology v5e:1x1 --batch-size 64 --precision bf16
# mshnet aot --topology v5e:1x1 --batch-size 64 --precision bf16 --sweep
# ```
#
# A training step of MSHNet at 256×256 takes the compiler about a minute, and 3 GB of this machine's
# memory. So here the same command asks about a smaller program: the test's step
# at 32×32. An answer is kept, so asking again costs only the tracing.

# %%
import json

command = "mshnet aot --topology v5e:1x1 --batch-size 8 --base-size 32 --phase eval --json"
done = subprocess.run(
    [sys.executable, "-m", *command.split()], stdout=subprocess.PIPE, text=True, check=True
)
answer = json.loads(done.stdout)
for key in ("topology", "fits", "hbm_bytes", "hbm_limit_bytes", "bytes_accessed", "flops", "bound"):
    print(f"{key:<16}{answer[key]}")
assert answer["fits"] and answer["bound"] == "memory"

# %% [markdown]
# ## When it does not fit
#
# The compiler gives up and says how much was missing, and it names the arrays. Here is a layer that
# compares every pixel with every other, at a size where that is no longer a good idea:


# %%
class EveryPair(nn.Module):
    def forward(self, pixels):
        affinity = torch.softmax(pixels @ pixels.T, dim=1)
        return affinity @ pixels + affinity.T @ pixels


too_large = aot.compile(EveryPair(), [torch.zeros(65536, 8)], topology="v5e:1x1")
print(too_large.table(rows=3))
assert not too_large.fits and too_large.buffers[0]["operation"].startswith("EveryPair/")

# %% [markdown]
# **What just happened.** Out of memory (OOM): 65,536² numbers of float32 are 16 GiB, more than a v5e
# has, and the operation that needs them has the name of its module. (This machine never held
# them: nothing was computed.) A smaller batch, bfloat16, or another way to compute it: whatever
# you try next takes a few seconds to check.

# %% [markdown]
# ## Eight cores
#
# A program for eight cores is traced on eight virtual ones, in a process of its own (lesson 05), and
# compiled for a slice with as many: Kaggle's v5e-8 is `v5e:2x4`.

# %%
SCRIPT = """
import json, sys
import torch
from torch import nn
from tpuscope import aot; from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.spmd import DataMesh

runtime.select_platform("CPU", 8)
mesh = DataMesh()  # all cores in a row
device = runtime.device()
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
model.to(device)
mesh.replicate([*model.parameters(), *model.buffers()])  # every core has the model

import torch_xla.core.xla_model as xm

[images] = xm.send_cpu_data_to_device([torch.zeros(64, 3, 32, 32)], device, mesh.split(4))


def step(images):
    loss = model(images).square().mean()
    loss.backward()
    return loss


report = aot.compile(step, [images], topology="v5e:2x4")
print(json.dumps(report.as_dict()))
"""
script = WORK / "eight.py"
script.write_text(SCRIPT)
done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
eight = json.loads(done.stdout.splitlines()[-1])
print(eight["cores"], "cores, each of them moves", f"{eight['bytes_accessed'] / 1e6:.1f} MB")
for found in eight["collectives"]:
    print(found["count"], found["kind"], found["bytes"], "bytes")
assert eight["cores"] == 8 and {c["kind"] for c in eight["collectives"]} == {"all-reduce"}

# %% [markdown]
# **What just happened.** Memory and bytes are one core's. Batch norm reduces its statistics over all
# cores, forward and backward, and the gradients are reduced too; the compiler has merged some of
# them. This is the TPU's compiler, so it is what a TPU would do, and not what XLA on the CPU showed
# in lesson 05. `mshnet aot --topology v5e:2x4 --batch-size 256` counts those of MSHNet, and
# `benchmarks/scaling.py` makes an estimate for up to 256 cores from them.

# %% [markdown]
# ## Layer by layer, before any compiler
#
# How do layers' names get into a TPU's program? While a step is traced, `tpuscope.track` listens
# to all modules and to autograd, and labels each operation with the layer that asked for it. The same can be
# read at once, for any module and on any device, with what has no lowering and would run on the
# host:

# %%
from tpuscope import track

upsampling = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 1, 3)
)
print(track(upsampling.to(device), torch.zeros(2, 1, 16, 16)).table())

# %% [markdown]
# **What just happened.** Forward and backward in one table. One operation fell back to the host: the
# gradient of `nn.Upsample`, for which XLA on the CPU has no lowering. It is why MSHNet writes it
# as two matrix products (lesson 04). `aot.compile` refuses such a step instead of compiling half
# of it.

# %% [markdown]
# ## What the estimate leaves out
#
# * **Time.** The bound is from below. Waiting for the host, small operations, exchange between
#   cores that is not hidden behind computing: all come on top. Only a TPU says how long it takes.
# * **Effort.** `effort="fast"` asks for the compiler's least effort, which takes about a minute for
#   MSHNet's training step with 32 images, and the usual effort seven. That one makes another
#   program: with `effort="full"` something may fit that did not.
# * **Versions.** Another libtpu is another compiler. The report names the one that answered.
# * **The first step.** An optimizer makes its state in its first step, so a program of that step has
#   no such arguments. Take one real step before, as in the exercise.

# %% [markdown]
# ## Exercise
#
# Adam keeps two numbers for each parameter, SGD without momentum none. A model has one linear layer
# from 1024 to 1024. **By how many bytes do the arguments of a training step grow from SGD to Adam?**
# Predict. Then compile both and compare. (Adam has no state before its first step: take one,
# `torch_xla.sync()`, then compile.)

# %% tags=["exercise"]
more_bytes = ...  # with Adam, in float32; to one percent

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("Two float32 numbers for each weight and each bias.") as expect:
    expect.answered(more_bytes=more_bytes)
    expect(isinstance(more_bytes, (int, float)), f"a number of bytes, please, not {more_bytes!r}")
    right = 2 * (1024 * 1024 + 1024) * 4
    expect(
        abs(more_bytes - right) < 0.01 * right,
        f"two float32 numbers for each of 1024 × 1024 weights and 1024 biases; not {more_bytes:,}",
    )

# %% tags=["solution"]
# @title Solution (open after trying)
import torch_xla


def arguments(make_optimizer):
    """Bytes of the arguments of the second training step."""
    model = nn.Linear(1024, 1024).to(device)
    optimizer = make_optimizer(model.parameters())

    def step(rows):
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    rows = torch.zeros(8, 1024)
    step(rows.to(device))
    torch_xla.sync()
    return aot.compile(step, [rows], topology="v5e:1x1").arguments_bytes


sgd = arguments(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
adam = arguments(lambda parameters: torch.optim.Adam(parameters, lr=0.1))
more_bytes = adam - sgd
print(f"SGD {sgd / 2**20:.2f} MiB, Adam {adam / 2**20:.2f} MiB: {more_bytes:,} bytes more")

# %% [markdown]
# ## Recap
#
# * `aot.compile(step, inputs, topology)` and `mshnet aot` compile for a TPU that is not there.
# * Arguments, temporaries and results against what is usable; the longer of bytes ÷ bandwidth and
#   operations ÷ peak is the least time.
# * Tiles are 8 × 128: a batch of 128 fills the lanes, and a small one moves its padding too.
# * A program for eight cores names its collectives, with their bytes.
# * Names of layers survive the compiler; time, effort, versions and the first step are the limits.
#
# **Next:** that was the course. Train on data of your own (lesson 03 brings them, lesson 06 keeps the
# run), or port a model of your own with
# [GUIDE.md]({{repository}}/blob/main/GUIDE.md#from-a-gpu-to-xla) beside you. The labs take the same
# tools to other programs: lab 10, image processing with torchax.
