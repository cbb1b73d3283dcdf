# %% [markdown]
# # 04 · One core
#
# **Write a TPU training step by hand, line by line beside its GPU form, and watch what gets compiled.**
#
# {{badges}}
#
# {{time: 15 min on v5e-1}}
#
# **You will be able to**
#
# * turn a GPU training loop into an XLA one: device, loader, step, save;
# * explain what a step costs the first time and the tenth, and why;
# * find the cause of a recompilation and fix it.
#
# **You need** lesson 02 (the runtime works). A TPU runtime in Colab or Kaggle; without one the same
# cells run on the CPU, through the same compiler front.

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
SMALL = not TPU  # a narrow network and small images where the CPU does the work

if not TPU:
    os.environ["PJRT_DEVICE"] = "CPU"  # XLA on the CPU; must be set before the device is opened

SIZE = 64 if SMALL else 256  # side of the images, pixels
BATCH = 4 if SMALL else 32
WIDTHS = (4, 8, 8, 16, 16) if SMALL else (16, 32, 64, 128, 256)  # channels of the five levels
DEPTHS = (1, 1, 1, 1, 1) if SMALL else (1, 2, 2, 2, 2)  # residual blocks of the five levels
SCENES = 40 if SMALL else 400

print(f"{'TPU' if TPU else 'no TPU: XLA on the CPU'}, {SIZE}×{SIZE}, batch {BATCH}")

# %% [markdown]
# ## Something to train on
#
# Lesson 03 puts a real data set in place. Here we take the built-in scenes, which every machine
# can draw for itself: clouds, sea, ground or buildings, and one to four targets of a few pixels.

# %%
from mshnet.data.bitmask import unpack
from mshnet.data.layout import DataFolder
from mshnet.data.loader import EvaluationSet, TrainingSet, evaluation_loader, training_loader
from mshnet.data.sample_cache import SampleCache
from mshnet.data.scenes import write_scenes

folder = write_scenes(f"scenes-{SIZE}-{SCENES}", train=SCENES, test=16, size=SIZE)
train = SampleCache(DataFolder(folder).samples("train"))
test = SampleCache(DataFolder(folder).samples("test"))
loader = training_loader(TrainingSet(train, SIZE, SIZE, seed=0), BATCH, workers=0)
images, masks = next(iter(loader))
print("images", tuple(images.shape), images.dtype, "· masks", tuple(masks.shape), masks.dtype)

# %% [markdown]
# **What just happened.** A batch is 8-bit and has one channel, and the masks are bits: eight rows of
# a mask share a row of bytes. It stays so until it is on the device, which is a fourteenth of the
# bytes of float32 RGB and a float32 mask; the way to the device is where a TPU waits for its host.

# %% [markdown]
# ## The device
#
# | GPU | XLA |
# |---|---|
# | `device = torch.device("cuda")` | `device = torch_xla.device()` |
# | `torch.manual_seed(0)` | the same for the host, and `torch_xla.manual_seed(0)` for the device |
# | `torch.autocast("cuda")` and a GradScaler | `torch.autocast("xla", dtype=torch.bfloat16)`, no scaler |
#
# The device's own random numbers (dropout, `torch.rand` on it) come from a separate generator
# with its own seed: compare with eager PyTorch without dropout. bfloat16 has the range of
# float32, so nothing has to be scaled. Open the device before the first `backward()` of the process,
# even one on the CPU: autograd counts devices once, and a later one makes it stop with an internal
# assertion.

# %%
import torch
import torch_xla

from mshnet import MSHNet, SLSIoULoss
from mshnet.loss import multiscale_loss
from mshnet.training.step import Normalize

device = torch_xla.device()  # GPU: torch.device("cuda")
torch.manual_seed(0)  # the weights are made on the host
torch_xla.manual_seed(0)  # what the device draws for itself; this network draws nothing
model = MSHNet(in_channels=3, widths=WIDTHS, depths=DEPTHS).to(device)  # GPU: the same
normalize = Normalize().to(device)  # 8-bit grey to the network's three normalised channels
criterion = SLSIoULoss()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)  # GPU: the same
print(runtime.describe(), "·", sum(p.numel() for p in model.parameters()), "parameters")

# %% [markdown]
# ## The loader
#
# | GPU | XLA |
# |---|---|
# | `for batch in loader: batch.to("cuda")` | `for batch in MpDeviceLoader(loader, device):` |
#
# `MpDeviceLoader` uploads the next batches in the background while the device computes. Leave out
# `pin_memory` and `non_blocking`, which only affect copies to CUDA devices.

# %%
from torch_xla.distributed.parallel_loader import MpDeviceLoader

feed = MpDeviceLoader(loader, device)

# %% [markdown]
# ## The step, in full
#
# Everything here is ordinary PyTorch but the last line. On XLA nothing has been computed when
# `optimizer.step()` returns: the operations were only recorded (lazy tensors). `torch_xla.sync()` ends the
# graph; it is compiled if this graph is new, and sent to the device.
#
# The losses are added up on the device. Reading each one (`loss.item()`) would make the host wait
# for the device at every step.

# %%
WARM_EPOCH = 0  # epoch 0 trains one head with the plain IoU loss, the later ones all heads


def step(images, masks, epoch, total):
    full = epoch > WARM_EPOCH
    scales, fused = model(normalize(images), full)
    target = unpack(masks).float()
    loss = multiscale_loss(criterion, scales, fused, target, WARM_EPOCH, epoch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + loss.detach()
    torch_xla.sync()  # GPU: nothing; CUDA runs each operation as it comes
    return total


# %% [markdown]
# ## What the first steps cost
#
# We time four steps and ask torch_xla how many graphs it compiled in each.

# %%
import time

import matplotlib.pyplot as plt


def watch_steps(epoch, count, total):
    """Run some steps; seconds and compilations of each, drawn as bars."""
    seconds, compiled = [], []
    for (images, masks), _ in zip(feed, range(count)):
        before, start = runtime.counters(), time.perf_counter()
        total = step(images, masks, epoch, total)
        total.cpu()  # waits for the device, only so that the clock is right
        seconds.append(time.perf_counter() - start)
        compiled.append((runtime.counters() - before).compilations)
        print(f"step {len(seconds)}: {seconds[-1]:6.2f} s, {compiled[-1]} compiled")
    _, axis = plt.subplots(figsize=(6, 2.2))
    colours = ["#ff9f0a" if graphs else "#0a84ff" for graphs in compiled]
    axis.bar(range(1, count + 1), seconds, color=colours)
    axis.set(xlabel="step", ylabel="seconds", title="orange: compiled something")
    axis.set_xticks(range(1, count + 1))
    plt.show()
    return compiled


total = torch.zeros(1).to(device)
compiled = watch_steps(epoch=0, count=4, total=total)
assert compiled == [1, 0, 0, 0], compiled

# %% [markdown]
# **What just happened.** The first step compiled, and the others ran the program that came out.
# That is the bargain: one slow step, then thousands that reuse the compiled program. Now an
# epoch of the full phase, where `full` is True and the network has more heads:

# %%
compiled = watch_steps(epoch=WARM_EPOCH + 1, count=4, total=total)
assert compiled == [1, 0, 0, 0], compiled

# %% [markdown]
# **What just happened.** A Python `if` chose other operations, so this is another graph, once.
# Two training graphs in a whole run are fine. The trouble starts when something makes a new graph
# at *every* step: a shape that changes (the exercise below), or a number.

# %% [markdown]
# ## A number that is sometimes 1
#
# torch_xla makes a plain **0 or 1 a constant of the graph**, because that saves an upload, and
# every other number an input. Here is a loss weight that is ramped up from 0 to 1:

# %%
x = torch.ones(4).to(device)


def compilations_of(make_weight):
    counts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        before = runtime.counters()
        y = (x * make_weight(value)).sum()
        torch_xla.sync()
        counts.append((runtime.counters() - before).compilations)
        del y
    return counts


plain = compilations_of(lambda value: value)
uploaded = compilations_of(lambda value: torch.tensor([value]).to(device))
print("plain number:   ", plain)
print("tensor of shape (1,):", uploaded)
assert plain == [1, 1, 0, 0, 1] and uploaded == [1, 0, 0, 0, 0]

# %% [markdown]
# **What just happened.** The plain number gave three graphs: "times 0", "times an input" and
# "times 1". The uploaded tensor gave one. A tensor without dimensions, `torch.tensor(0.0)`, is
# treated like a plain number, which is why `total` above has the shape `(1,)`. In the package,
# whatever outlives a step is uploaded from the host (`Backend.prepare` in
# `mshnet/training/backend.py`), and a test holds a whole run to three graphs: warm-up, full phase,
# evaluation.

# %% [markdown]
# ## An epoch
#
# With nothing to wait for, the loop is short.

# %%
from tqdm import tqdm

EPOCHS = 3 if SMALL else 20


def train_epoch(epoch):
    model.train()
    loader.batch_sampler.epoch = epoch  # another order, another augmentation
    total = torch.zeros(1).to(device)
    for images, masks in tqdm(feed, desc=f"epoch {epoch}", leave=False):
        total = step(images, masks, epoch, total)
    return total.item() / len(loader)  # the only read of the epoch


before = runtime.counters()
losses = [train_epoch(epoch) for epoch in range(WARM_EPOCH + 1, WARM_EPOCH + 1 + EPOCHS)]
counted = runtime.counters() - before
print("mean losses", [round(loss, 3) for loss in losses])
print(counted)
assert counted.compilations == counted.fallbacks == 0, counted

# %% [markdown]
# **What just happened.** Nothing was compiled, one value was read in each epoch, and there was no
# host fallback: every operation has an XLA lowering, so none ran on the host. When your own loop
# is slow, these three numbers are the first to look at.
#
# If you want a line for every tenth step, keep the values on the device and read them together:
# `log.append(torch.stack([loss.detach(), accuracy]))` in the step, `torch.stack(log).cpu()` once an
# epoch. That is one read, and one more small program.

# %% [markdown]
# ## Look at it
#
# Evaluation is one more graph. Its last batch is filled up with black frames, because another
# batch size would be another graph.

# %%
from mshnet import plots
from mshnet.training import backend as backends
from mshnet.training.evaluation import evaluate

backend = backends.make_backend("tpu")  # "tpu" is XLA; PJRT_DEVICE says on what
test_loader = evaluation_loader(EvaluationSet(test, SIZE), BATCH, workers=0)
logits = []  # of each image, for the picture below


def keep(first, rows):
    logits.extend(rows)


metrics = evaluate(model, normalize, backend, test_loader, full=True, look=keep)
result = metrics.compute()
print({name: round(result[name], 4) for name in ("iou", "niou", "pd", "fa")})

# %%
shown = range(3)
plots.examples(
    images=[test[i][0] for i in shown],
    masks=[test[i][1] != 0 for i in shown],
    predictions=[(logits[i][0] > 0).numpy() for i in shown],
    names=[test.samples[i].name for i in shown],
)

# %% [markdown]
# **What just happened.** After a few epochs of a small network the answer is poor, and the picture
# shows how: green circles are hits, orange ones are missed targets, red ones are false alarms.
# With `SMALL = False` the same cells train the real network, for longer.

# %% [markdown]
# ## Save
#
# | GPU | XLA |
# |---|---|
# | `torch.save(model.state_dict(), path)` | the same, after moving the tensors to the host |
#
# A file that holds XLA tensors does not open as it is where torch_xla is missing. Tensors on the
# host open everywhere. (`xm.save` does the move for you; lesson 06 explains what else it does.)

# %%
weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
torch.save({"state_dict": weights}, "one_core.pkl")

again = MSHNet(in_channels=3, widths=WIDTHS, depths=DEPTHS)  # on the host, as on any laptop
again.load_state_dict(torch.load("one_core.pkl", weights_only=True)["state_dict"])
print(sum(tensor.nbytes for tensor in weights.values()) // 1024, "KiB, opens without XLA")

# %% [markdown]
# ## The same, as a command
#
# All of this is `mshnet train` (or `python main_tpu.py` in a clone): the trainer, the log, the
# best weights, the pictures. It is also a function. The code path is the same for every device;
# only `device` says where it runs. Without a TPU we take the plain CPU this time: no compiler, so
# a run this small is over sooner.

# %%
from mshnet import api

settings = {
    "dataset_dir": str(folder),
    "batch_size": BATCH,
    "base_size": SIZE,
    "crop_size": SIZE,
    "epochs": 2 if SMALL else 40,
    "warm_epoch": WARM_EPOCH,
    "device": "tpu" if TPU else "cpu",
    "widths": WIDTHS,
    "depths": DEPTHS,
    "workers": 0,
}
best = api.train(settings)
print(best)

# %%
from pathlib import Path

from mshnet.training.run_dir import read_log

plots.curves(read_log(Path(best["run"])))

# %% [markdown]
# **What just happened.** Two epochs on this small network teach next to nothing: watch Pd and Fa in
# the lines above. The loss of the second epoch is another function than that of the first, the
# warm-up's, so a jump between them is no setback. `make demo` and lesson 08 train for long enough to
# find something.

# %% [markdown]
# ## Exercise
#
# The loader drops the last images that do not fill a batch. Suppose it did not: the last batch of
# an epoch would hold fewer images. **How many programs does the training step of one epoch need
# then, and how many are compiled in ten epochs?** Write down your guess. Then feed the step with
# batches of `BATCH` and `BATCH - 1` images and count with `runtime.counters()`. (The program for full
# batches is there already, so you will count one less.)

# %% tags=["exercise"]
model.train()  # evaluation had switched it
in_one_epoch = ...  # programs of the training step, the one for full batches included
in_ten_epochs = ...

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("A program for each shape, and each only once.") as expect:
    expect.answered(in_one_epoch=in_one_epoch, in_ten_epochs=in_ten_epochs)
    expect(
        in_one_epoch == 2, f"full batches have one shape, the last one another: not {in_one_epoch}"
    )
    expect(
        in_ten_epochs == 2, f"XLA keeps a program for each shape it has seen: not {in_ten_epochs}"
    )

# %% tags=["solution"]
# @title Solution (open after trying)
model.train()
torch_xla.sync()  # away with what an attempt may have left
total = torch.zeros(1).to(device)
before = runtime.counters()
for size in (BATCH, BATCH - 1, BATCH, BATCH - 1):
    images, masks = next(iter(loader))
    total = step(images[:size].to(device), masks[:size].to(device), WARM_EPOCH + 1, total)
extra = (runtime.counters() - before).compilations
print("compiled for the odd size:", extra)
assert extra == 1, extra
in_one_epoch = in_ten_epochs = 1 + extra  # the one for full batches was there

# %% [markdown] tags=["solution"]
# One more, and only once: XLA keeps a program for each shape it has seen. One odd batch an epoch
# costs one compilation in the whole run. Images of differing sizes would cost one *each*, which is
# why everything here is resized or cropped to one size.

# %% [markdown]
# ## Recap
#
# * Four lines change from GPU to XLA: the device, the loader, `torch_xla.sync()` at the end of a
#   step, and tensors to the host before saving.
# * A new graph is compiled; a known one is only run. A new shape makes a graph new, and so does a
#   plain number that becomes 0 or 1.
# * Read from the device once an epoch, not once a step; the counters show whether you do.
#
# **Next:** lesson 05, eight cores.
