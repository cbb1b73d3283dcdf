# %% [markdown]
# # 07 · Read the metrics report
#
# **Break a training step in five ways (recompilation, read, host fallback, missing sync), let a report
# name the line and the reason each time, and fix it until the report is clean.**
#
# {{badges}}
#
# {{time: 25 min on v5e-1}}
#
# **You will be able to**
#
# * watch any model's training in three lines, and act on what the report says;
# * find out which value made a step compile again, and from which line it came;
# * recognise a read, a host fallback and a missing sync, and know what each costs;
# * read a raw `metrics_report()`, your own or one that somebody has pasted;
# * assert a budget for a training run, and know which debugging variables show more.
#
# **You need** lesson 04 (what a step is, and when it is compiled). Any runtime: the breaks and their
# reports are the same on a TPU and without one.

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

# %%
import os

from tpuscope.engine import torch_xla as runtime

TPU = runtime.tpu_chips() > 0
SMALL = not TPU  # small images where the CPU does the work

if not TPU:
    os.environ["PJRT_DEVICE"] = "CPU"  # XLA on the CPU; must be set before the device is opened

SIZE = 16 if SMALL else 128  # side of the images, pixels
BATCH = 4 if SMALL else 32

# %% [markdown]
# ## Your own model, in three lines
#
# The tool works with any model. So here is a small one, with a training
# step in which each fault of this lesson can be switched on.

# %%
import torch
import torch_xla
from torch import nn

device = torch_xla.device()
print(runtime.describe())


class Model:
    """A small segmentation network and its optimizer, on the device."""

    def __init__(self):
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 1, 1)
        ).to(device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def step(self, images, masks, gamma=2.0):
        """Focal loss: down-weights well-classified pixels, more so for larger gamma."""
        p = torch.sigmoid(self.network(images))
        right = torch.where(masks > 0, p, 1 - p)
        loss = -((1 - right) ** gamma * torch.log(right + 1e-6)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batch(size=BATCH):
    """Noise with bright targets, on the host."""
    images = torch.rand(size, 1, SIZE, SIZE)
    return images, (images > 0.95).float()


# %%
from tpuscope import watch

model = Model()
with watch() as w:
    for _ in range(4):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks)
        torch_xla.sync()
print(w.report())

assert w.report().fine and [step.programs for step in w.steps] == [1, 1, 1, 1]

# %% [markdown]
# **What just happened.** A table and a verdict. Four steps were one program each, compiled once.
# Nothing was read and nothing ran on the host. This is what a sound loop looks like; the rest of the
# lesson is about other ones.
#
# | row | what it is |
# |---|---|
# | tracing | the host's time for data, Python and recording operations |
# | programs run | what the device did, each from its launch to its end; it works beside the host |
# | to / from the device | transfers: how many, how much, how long |
# | program cache | how often a program was there already, and how often it had to be compiled |
# | graph of step 1 | a graph that occurred first in step 1: how often it ran, and its new data |

# %% [markdown]
# ## Break 1: a shape that changes
#
# The last batch of an epoch is not full.

# %%
model = Model()
with watch() as w:
    for size in (BATCH, BATCH, BATCH - 1):
        images, masks = (tensor.to(device) for tensor in batch(size))
        model.step(images, masks)
        torch_xla.sync()
print(w.report())

assert f"became ({BATCH - 1}, 1, {SIZE}, {SIZE}) at step 3" in w.report().verdicts[0]

# %% [markdown]
# **What just happened.** The report names the input, its line, both shapes and the step. (Why "where
# 0 would do"? The program for full batches is still there from the section above: programs live as
# long as the process.) Two steps can also be laid side by side:

# %%
from tpuscope import compare

print(compare(w.steps[1], w.steps[2]))

# %% [markdown]
# Fixed: the last batch is filled up, and a weight marks the samples that count; or it is dropped. A
# `DataLoader` does the latter with `drop_last=True`. With batch norm drop it: samples that fill up
# would be part of its statistics, whatever their weight.

# %%
model = Model()
with watch() as w:
    for _ in range(3):
        images, masks = (tensor.to(device) for tensor in batch(BATCH))
        model.step(images, masks)
        torch_xla.sync()
print(w.report().verdicts)

assert w.report().fine

# %% [markdown]
# ## Break 2: a Python number that ends up in the graph
#
# The focal loss is to become sharper while training goes on, so its exponent grows from step to
# step. Most Python numbers are handed to the program as data; lesson 04 showed that 0 and 1 are not.
# And some operations take a number as a part of themselves, whatever it is. `**` is one.

# %%
model = Model()
with watch() as w:
    for gamma in (1.5, 1.75, 2.25):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks, gamma)
        torch_xla.sync()
print(w.report())

assert "was 1.5 and became 1.75 at step 2 (then 2.25; 2 compilations)" in w.report().verdicts[0]

# %% [markdown]
# **What just happened.** Every step compiled, and the report names the number with its old and new
# values. In a real network each of those is minutes. The others that do it were found by trying:
# `F.threshold`, `norm(p)`, the `eps` of a normalisation, `arange`, the ends of a slice.
#
# Fixed: the number is passed as data. A tensor with one dimension, made on the host.

# %%
model = Model()
with watch() as w:
    for gamma in (1.5, 1.75, 2.25):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks, torch.tensor([gamma]).to(device))
        torch_xla.sync()
print(w.report().verdicts)

assert w.report().fine and w.report().compilations == 1

# %% [markdown]
# ## Break 3: reading in the loop
#
# One line to see the loss, from every GPU tutorial:

# %%
model = Model()
with watch() as w:
    for _ in range(3):
        images, masks = (tensor.to(device) for tensor in batch())
        loss = model.step(images, masks)
        print(f"loss {loss.item():.4f}")
        torch_xla.sync()
print(w.report())

assert "3 reads cut the graph" in w.report().verdicts[0]
assert [step.programs for step in w.steps] == [2, 2, 2]

# %% [markdown]
# **What just happened.** `.item()` needs a value of a step that has not been run. So everything that
# leads to the loss runs right there, as a program of its own; at the sync the rest follows, and
# because only the loss was kept, it computes the forward pass a second time. `print(loss)`,
# `f"{loss}"`, `if loss > 1:`, `loss.cpu()` do the same.
#
# Fixed in two steps. Reading after the sync cuts no graph, but the host still waits in every step.
# Adding up on the device and reading once removes the wait.

# %%
model = Model()
total = torch.zeros(1).to(device)
with watch() as w:
    for _ in range(10):
        images, masks = (tensor.to(device) for tensor in batch())
        total = total + model.step(images, masks)
        torch_xla.sync()
    print(f"mean loss {total.item() / 10:.4f}")
print(w.report().verdicts)

assert w.report().fine and w.report().host_reads == 1

# %% [markdown]
# ## Break 4: an operation that XLA does not have
#
# Some sensors deliver NaN for dead pixels, and `torch.nansum` leaves them out of a sum.


# %%
class WithDeadPixels(Model):
    """The same, with a penalty on the output that skips dead pixels."""

    def penalty(self, values):
        return torch.nansum(values)

    def step(self, images, masks):
        output = self.network(images)
        loss = (output - masks).square().mean() + 1e-4 * self.penalty(output.square())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


model = WithDeadPixels()
with watch() as w:
    for _ in range(3):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks)
        torch_xla.sync()
print(w.report())

assert w.report().counts.fallbacks == {"nansum": 3}
assert w.report().verdicts[0].startswith("nansum ran on the host 3 times (1 a step), from ")

# %% [markdown]
# **What just happened.** No error and no warning: torch_xla ran the pending operations, fetched the
# tensor, computed the sum on the host, and sent it back; `aten::` counters are where it admits that.
# Each one costs two transfers and splits the step's graph in two. The fix is to express the same with
# operations that have an XLA lowering:


# %%
class Mended(WithDeadPixels):
    def penalty(self, values):
        return torch.where(values.isnan(), 0.0, values).sum()


model = Mended()
with watch() as w:
    for _ in range(3):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks)
        torch_xla.sync()
print(w.report().verdicts)

assert w.report().fine and w.report().fallbacks == 0

# %% [markdown]
# Backward-pass fallbacks are hard to find, because nothing in your code has their name. The
# report gives the line of the forward operation. You will see some at the end of this lesson.

# %% [markdown]
# ## Break 5: a missing sync
#
# The loop is ported from a GPU, and nobody ends a step:

# %%
model = Model()
losses = []
with watch() as w:
    for _ in range(3):
        images, masks = (tensor.to(device) for tensor in batch())
        losses.append(model.step(images, masks))
print(w.report())

assert "No sync in the block, though 3 updates of one optimizer came" in w.report().verdicts[0]

# %% [markdown]
# **What just happened.** Nothing: three updates were recorded, none was computed. At the
# next read or sync all three would run as one huge program, and a loop of four updates would
# compile another one. Fixed by either of these:

# %%
torch_xla.sync()  # away with what the broken loop left
model = Model()
with watch() as w:
    for _ in range(2):
        images, masks = (tensor.to(device) for tensor in batch())
        model.step(images, masks)
        torch_xla.sync()
    for _ in range(2):
        with torch_xla.step():  # syncs at its end
            images, masks = (tensor.to(device) for tensor in batch())
            model.step(images, masks)
print(w.report().verdicts)

assert w.report().fine and len(w.steps) == 4

# %% [markdown]
# ## A budget
#
# Add a test so it stays fixed. A budget is checked at the end of the block, and fails with the reason
# in one line. This project's tests hold whole training runs to one
# (`tests/xla/test_trainer.py`).

# %%
from tpuscope import Budget, BudgetExceeded

model = Model()
try:
    with watch(budget=Budget(compilations=1, fallbacks=0, host_reads=0)):
        for gamma in (2.5, 2.75):
            images, masks = (tensor.to(device) for tensor in batch())
            model.step(images, masks, gamma)
            torch_xla.sync()
    exceeded = ""
except BudgetExceeded as error:
    exceeded = str(error)
print(exceeded)

assert "2 compilations, 1 allowed" in exceeded

# %% [markdown]
# ## When it happened
#
# The picture of the last watched loops: two bars for each step. The host's is in parts: tracing,
# compiling, waiting for the device. The device's stands beside it and not on top, since both work at
# the same time; on XLA:CPU too.

# %%
from tpuscope import timeline

model = Model()
with watch() as w:
    for size in (BATCH, BATCH, BATCH - 2, BATCH, BATCH):
        images, masks = (tensor.to(device) for tensor in batch(size))
        model.step(images, masks)
        torch_xla.sync()
timeline(w)

# %% [markdown]
# ## The raw report
#
# Everything above comes from torch_xla's own counters. Its own report is what people paste when they
# ask for help. Here is one of a faulty run; it runs in another process, and on the CPU, so
# that it leaves this notebook's device alone.

# %%
ELSEWHERE = """
import torch, torch_xla
import torch_xla.debug.metrics as met

weights = torch.rand(64, 64).to(torch_xla.device())
for size in (32, 31, 30, 29, 28, 27):
    x = torch.rand(size, 64).to(torch_xla.device())
    y = torch.relu(x @ weights)
    print(torch.nansum(y).item())
    torch_xla.sync()
print(met.metrics_report())
"""


def elsewhere(script, **variables):
    """What a script prints, in a process of its own on the CPU."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"PJRT_DEVICE": "CPU"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


pasted = elsewhere(ELSEWHERE)
start = pasted.index("Metric: CompileTime")
print(pasted[start : start + 600], "\n…\n", pasted[-420:])

# %% [markdown]
# | name | counts |
# |---|---|
# | `CompileTime` | compilations: `TotalSamples` is how many, `Accumulator` all their time |
# | `ExecuteTime` (`ExecuteReplicatedTime`) | programs on the device, from launch to end |
# | `TransferToDeviceTime`, `OutboundData` | host to device: time and bytes |
# | `TransferFromDeviceTime`, `InboundData` | device to host, the wait for the value included |
# | `CachedCompile`, `UncachedCompile` | programs that were there already, and those that were not |
# | `MarkStep` | syncs |
# | `LazyTracing`, `xla::…` | operations recorded (lazy tensors), and torch_xla's time for it |
# | `aten::_local_scalar_dense` | values read one by one, as by `.item()` |
# | any other `aten::…` | **host fallbacks**, by operation |
#
# Times are printed in parts, `01m03s456ms789.012us`, and each part is rounded, not cut off: 40.574
# milliseconds come out as `041ms574.000us`. Older releases say `TransferToServerTime`.
#
# `from_text` does the reading. It has no lines and no causes, because the text has none, but the
# verdicts are a start:

# %%
from tpuscope import from_text

theirs = from_text(pasted)
print(theirs)

assert theirs.counts.fallbacks == {"nansum": 6} and theirs.counts.steps == 6
assert theirs.counts.scalar_reads == 6 and theirs.counts.cache[1] > 5

# %% [markdown]
# **What just happened.** Half of a paste works too, down to a single metric; a text that is no
# report is refused. To get the lines and causes you would ask for the same run under `watch()`.

# %% [markdown]
# ## Further tools
#
# Environment variables, to be set before the process starts.
#
# **`PT_XLA_DEBUG_LEVEL=1`** prints an analysis for every compilation, 2 for every execution too: what
# caused it, and the Python line. What differs from the graph before, it does not say.

# %%
analysis = elsewhere(ELSEWHERE, PT_XLA_DEBUG_LEVEL="1")
start = analysis.index("Compilation Analysis: Compilation Cause")
print(analysis[start : start + 620])

# %% [markdown]
# **`XLA_IR_DEBUG=1`** makes the pending graph carry your source lines, **`XLA_HLO_DEBUG=1`** the HLO
# that the compiler gets (tracing becomes slower). **`XLA_FLAGS=--xla_dump_to=FOLDER`** writes every
# compiled program to files, before and after optimisation.

# %%
import tempfile
from pathlib import Path

TEXT = """
import torch, torch_xla
x = torch.rand(4, 4).to(torch_xla.device())
y = torch.relu(x) + x
print(torch_xla._XLAC._get_xla_tensors_text([y]))
print(torch_xla._XLAC._get_xla_tensors_hlo([y]))
torch_xla.sync()
"""
with tempfile.TemporaryDirectory() as folder:
    dump = f"--xla_dump_to={folder}"
    with_lines = elsewhere(TEXT, XLA_IR_DEBUG="1", XLA_HLO_DEBUG="1", XLA_FLAGS=dump)
    dumped = sorted(path.name for path in Path(folder).iterdir())
print(
    *[line for line in with_lines.splitlines() if "aten::" in line or "maximum(" in line], sep="\n"
)
print(*dumped[:4], sep="\n")

assert "location=" in with_lines and "source_line=" in with_lines
assert any("before_optimizations" in name for name in dumped)

# %% [markdown]
# ## The official implementation versus ours
#
# Now for the detector. MSHNet's training step written the way its official code is (upsampling
# modules, a loss that loops over the samples, `loss.item()` in every step, an incomplete last batch),
# moved to XLA by changing the device; and the step of this package. The same narrow network, three
# batches, the warm-up's loss.

# %%
beside = Path("../benchmarks")
if not beside.is_dir():  # Colab and Kaggle: what is installed is the package alone
    address = "{{repository}}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", address, "clone"], check=True)
    beside = Path("clone/benchmarks")
sys.path.insert(0, str(beside))

from report_official import reports

official, ours = reports(size=32, batch_size=2, scenes=5, widths=(2, 2, 2, 2, 2), epoch=0)
print("the official way\n", official, "\nours\n", ours, sep="\n")

assert ours.fine and ours.compilations == 1 and ours.host_reads == 1
assert official.compilations > 3 and official.host_reads == 3
assert TPU or official.counts.fallbacks == {"upsample_bilinear2d_backward": 12}

# %% [markdown]
# **What just happened.** Each finding about the official implementation is one of the breaks above, or
# one that is new here: batch norm counts its batches in a tensor without dimensions, and its first
# 0 is a constant of the first graph. So the second step compiles the whole network once more. It
# happens to every network with `BatchNorm2d` (`benchmarks/report_resnet18.py`) unless something
# syncs before the first step, as `MpDeviceLoader` does. `Backend.move` in
# `mshnet/training/backend.py` leaves those counters on the host.
#
# The upsampling's backward pass has no XLA lowering off TPU, so whether you see those fallbacks
# depends on your runtime. Ours needs none anywhere, because it upsamples by two matrix products.

# %% [markdown]
# ## Exercise
#
# A curriculum: training begins with small crops, which grow. The loop below compiles for every new
# size. **Read in the report why, and fix `train_on` so that three steps compile one program.** The
# loss stays the mean over the pixels of the crop. (The network may see zeros or the whole image
# outside of it; both are right here.)


# %% tags=["exercise"]
def train_on(model, side):
    """One step on the `side` × `side` pixels at the top left. Returns the loss, on the device."""
    images, masks = (tensor.to(device) for tensor in batch())
    return model.step(images[..., :side, :side], masks[..., :side, :side])  # fix this


model = Model()
with watch() as w:
    for side in (SIZE // 2, SIZE // 4 * 3, SIZE):
        train_on(model, side)
        torch_xla.sync()
print(w.report())

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
import copy
import random

from course import checking


def reference(network, images, masks, side, masked):
    """The loss on the host: mean over the crop; the network sees zeros outside, or everything."""
    inside = torch.zeros(1, 1, SIZE, SIZE)
    inside[..., :side, :side] = 1
    with torch.no_grad():
        p = torch.sigmoid(network(images * inside if masked else images))
    right = torch.where(masks > 0, p, 1 - p)[..., :side, :side]
    return -((1 - right) ** 2.0 * torch.log(right + 1e-6)).mean().item()


with checking("One program for all crops.") as expect:
    with watch() as w:
        model = Model()
        for side in random.sample(range(SIZE // 4, SIZE), 3):
            train_on(model, side)
            torch_xla.sync()
    report = w.report()
    expect(
        report.compilations <= 1,
        f"{report.compilations} compilations for three crops; the report says: {report.verdicts[0]}",
    )
    for side in (SIZE // 4, SIZE // 2):
        model = Model()
        twin, state = copy.deepcopy(model.network).cpu(), torch.get_rng_state()
        loss = train_on(model, side).cpu().item()
        torch.set_rng_state(state)
        right = [reference(twin, *batch(), side, masked) for masked in (True, False)]
        expect(
            min(abs(loss - r) / r for r in right) < (0.1 if TPU else 0.01),
            f"with side {side} the loss is {loss:.4f}; the mean over the pixels of the crop is "
            f"{right[0]:.4f} (zeros outside) or {right[1]:.4f} (the whole image seen)",
        )


# %% tags=["solution"]
# @title Solution (open after trying)
def train_on(model, side):
    """The crop is a mask of the loss: 1 where pixels count. All shapes stay."""
    inside = torch.zeros(1, 1, SIZE, SIZE)
    inside[..., :side, :side] = 1  # on the host, where shapes are free
    images, masks = (tensor.to(device) for tensor in batch())
    inside = inside.to(device)
    p = torch.sigmoid(model.network(images * inside))
    right = torch.where(masks > 0, p, 1 - p)
    losses = -((1 - right) ** 2.0 * torch.log(right + 1e-6)) * inside
    loss = losses.sum() / (inside.sum() * BATCH)
    model.optimizer.zero_grad()
    loss.backward()
    model.optimizer.step()
    return loss.detach()


model = Model()
with watch(budget=Budget(compilations=1)) as w:
    for side in (SIZE // 2, SIZE // 4 * 3, SIZE):
        train_on(model, side)
        torch_xla.sync()
print(w.report().verdicts)
assert w.report().fine

# %% [markdown] tags=["solution"]
# The report names the stop of the slice: it is a part of the graph, and so is every shape that
# follows from it. A mask of one shape carries the same information as data. It costs computing the
# pixels outside, which is nearly always cheaper than a compilation.
#
# The same pixels count, but it is not quite the same training: normalisation, here GroupNorm, also
# averages over the zeros outside. Cropping on the host and resizing to one size, or to a few sizes
# at one program each, avoids that.

# %% [markdown]
# ## Recap
#
# * `with watch() as w:` around a loop, then `print(w.report())`: a table, and sentences with the fix.
# * A step compiles again because a shape, a Python value or the operations changed; the report names
#   which, from what to what, and where. `compare` lays two steps side by side.
# * A read cuts the step, a fallback takes it through the host, and without a sync nothing runs.
# * In a raw report look at `CompileTime`, `UncachedCompile` and the `aten::` counters first;
#   `from_text` reads it for you.
# * `Budget` keeps what was reached; `PT_XLA_DEBUG_LEVEL`, `XLA_IR_DEBUG` and `--xla_dump_to` show the
#   layers below.
#
# **Next:** lesson 08, evaluate and look.
