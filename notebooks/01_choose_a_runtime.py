# %% [markdown]
# # 01 · Choose a runtime
#
# **Know what a TPU is good at, where to get one, and what this notebook is running on.**
#
# {{badges}}
#
# The guide in other languages: [中文]({{repository}}/blob/main/GUIDE.zh.md) · [한국어]({{repository}}/blob/main/GUIDE.ko.md)
#
# {{time: 10 min on v5e-1}}
#
# **You will be able to**
#
# * explain what a TPU needs from a program: large matrix products, fixed shapes, a compiler (XLA);
# * choose between one core, eight cores and a GPU, and find the menu that gives it to you;
# * find out what a machine has without opening its TPU.
#
# **You need** a Google or Kaggle account if you want a TPU. To read and run this lesson you need
# only a machine with Python.

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
# ## What a TPU is for
#
# The heart of a TPU core are its **matrix units** (MXU), systolic arrays: square grids of multiply-accumulate cells, 128×128 on a
# v5e and 256×256 on a [v6e](https://docs.cloud.google.com/tpu/docs/v6e). Beside them works a vector
# unit (VPU) of 128 lanes. Convolutions are matrix products here, so a network like MSHNet keeps the grids
# busy, if its arrays fill them.
#
# Nothing is scheduled at run time. A compiler, **XLA**, lays out every array and orders every
# operation beforehand. For that it needs the whole program, called a graph, and **fixed shapes**.
# So PyTorch/XLA tensors are *lazy*: an operation is not computed when Python reaches it. PyTorch/XLA records
# (traces) each operation and compiles the graph at the end of the step, or reuses the compiled program if it
# has seen the same graph before.
#
# Both facts in one picture. The left half is a sketch; the right half is computed.

# %%
import matplotlib.pyplot as plt
import numpy as np

LANES = 128
WORK, WAIT, IDLE = "#0a84ff", "#ff9f0a", "#d1d1d6"


def used(count):
    """Share of the lanes that hold data when an axis of `count` values is laid over them."""
    return count / (np.ceil(count / LANES) * LANES)


figure, (clock, lanes) = plt.subplots(1, 2, figsize=(11, 3.1), layout="constrained")

launches = [(0.45 * i, 0.3) for i in range(18)]  # Python hands over one operation after another
clock.broken_barh(launches, (3.1, 0.7), color=IDLE)
clock.broken_barh([(start + 0.2, 0.35) for start, _ in launches], (2.2, 0.7), color=WORK)
for start, width, colour, text in (
    (0.0, 0.9, IDLE, "write"),
    (0.9, 4.0, WAIT, "compile, once"),
    (4.9, 0.9, IDLE, "write"),
    (5.9, 0.9, IDLE, "write"),
):
    clock.broken_barh([(start, width)], (1.0, 0.7), color=colour)
    clock.text(start + width / 2, 1.35, text, ha="center", va="center", fontsize=8)
for number, start in enumerate((4.9, 5.9, 6.9), start=1):
    clock.broken_barh([(start, 0.95)], (0.1, 0.7), color=WORK)
    clock.text(start + 0.47, 0.45, f"step {number}", ha="center", va="center", fontsize=8)
clock.set_yticks([3.45, 2.55, 1.35, 0.45], ["eager: Python", "eager: GPU", "XLA: host", "XLA: TPU"])
clock.set(title="who works when (a sketch, not to scale)", xlabel="time →", xticks=[])

counts = np.arange(1, 385)
lanes.plot(counts, 100 * used(counts), color=WORK)
for count, side in ((32, "left"), (128, "right"), (129, "left")):
    percent = 100 * used(count)
    lanes.plot(count, percent, "o", color=WAIT)
    shift = 9 if side == "left" else -9
    lanes.text(count + shift, percent, f"{count} values: {percent:.0f} %", ha=side, va="center")
lanes.set(title="lanes that hold data", xlabel="length of the axis", ylabel="%", ylim=(0, 109))
plt.show()

# %% [markdown]
# **What just happened.** Left: eager PyTorch hands each operation to the GPU as Python meets it.
# With XLA the host traces a whole step, compiles it once (orange), and from then on the device
# runs whole steps while the host already traces the next. A new shape causes a recompilation: another
# orange bar anywhere in the row.
#
# Right: an axis is cut into pieces of 128 and the last piece is filled up. An axis of 32 uses a
# quarter of the lanes and still pays for all of them; one value too many costs almost half. The
# compiler chooses which axis lies there, channels or batch. Sizes that fill it are your part, and
# the exercise is about that.

# %% [markdown]
# ## Where to get a TPU
#
# | where | TPU | cores | memory of a core |
# |---|---|---|---|
# | Colab, free and paid | v5e-1 | **1** | 16 GB |
# | Colab, paid | v6e-1 | **1** | 32 GB |
# | Kaggle | v5e-8 | **8** | 16 GB |
# | Cloud TPU VM | v5litepod-8, v6e-8, larger ones | 8 and up | as above |
#
# How to get one:
#
# * **Colab**: Runtime > Change runtime type > v5e-1 TPU (or v6e-1 TPU) > Save.
# * **Kaggle**: Settings > Accelerator > TPU v5e-8.
# * **Cloud**: `gcloud compute tpus tpu-vm create …`, then log in to the machine.
#
# The first two as pictures (drawn; menus have more entries than that):

# %%
from course import clicks

clicks(
    (
        "Colab: Runtime",
        ["Run all", "Restart session", "Change runtime type"],
        "Change runtime type",
    ),
    ("Hardware accelerator", ["CPU", "T4 GPU", "v5e-1 TPU", "v6e-1 TPU"], "v5e-1 TPU"),
    ("", ["Cancel", "Save"], "Save"),
)

# %%
clicks(
    ("Kaggle: Settings", ["Accelerator", "Language", "Persistence"], "Accelerator"),
    ("Accelerator", ["None", "GPU T4 x2", "GPU P100", "TPU v5e-8"], "TPU v5e-8"),
)

# %% [markdown]
# And what to know:
#
# * The number after the dash counts cores. **Colab's v2-8 is gone**: its
#   [retirement](https://github.com/googlecolab/colabtools/issues/5566) was announced in August 2025
#   and completed in September, and Colab has had no 8-core TPU since. Guides that say
#   `--num-cores 8` in Colab are older than that. Lesson 05 uses Kaggle for eight cores, or eight
#   virtual ones.
# * Free Colab sessions are short and end without asking. Lesson 06 saves to Drive and resumes.
# * Kaggle asks for a verified phone number before it provides accelerators. A kernel whose metadata
#   pin a CPU docker image gets a machine without a TPU, and no message.
# * After changing the runtime you have a new machine: files and installed packages of the old one
#   are gone.

# %% [markdown]
# ## When a GPU is the better choice
#
# * **Small experiments.** A run of a few minutes can be over before a compilation has paid off.
# * **Shapes that change**: images of many sizes, point clouds, loops that run until something is
#   found. Each new shape is another compilation. (Resizing or padding to a few sizes cures many.)
# * **Operations XLA does not know**: custom CUDA kernels, or code that reads values on the host in
#   every step.
# * **Debugging.** Eager errors name the line. Develop on CPU or GPU, then move.
#
# A TPU is the better choice for what is long and regular: the same step, thousands of times, on
# batches that fill the lanes. Training MSHNet for 400 epochs at one image size is such work. The
# package runs the same code on all three, so the choice can be made late.

# %% [markdown]
# ## Where does this notebook run?
#
# The next cell only looks and opens nothing. This matters: **a TPU is opened by one process at a
# time**, and the first computation in this notebook would open it and keep it until the kernel is
# restarted. A training run started beside it (`!mshnet train …`) would then find the TPU taken. So
# `runtime.tpu_chips()` counts devices on the PCI bus instead of asking the TPU.

# %%
import os
import platform

import torch

from tpuscope.engine import torch_xla as runtime


def place():
    """The name of the service that runs this notebook."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:  # first: Kaggle may hold Colab's packages, too
        return "Kaggle"
    try:
        colab = importlib.util.find_spec("google.colab") is not None
    except ModuleNotFoundError:  # not even the package `google` is there
        colab = False
    return "Colab" if colab else "own machine"


found = {
    "place": place(),
    "TPU chips": runtime.tpu_chips(),
    "CUDA GPUs": torch.cuda.device_count(),
    "CPU cores": os.cpu_count(),
    "memory, GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
    "Python": platform.python_version(),
    "torch": torch.__version__,
    "torch_xla": "installed" if runtime.installed() else "not installed",
}
for name, value in found.items():
    print(f"{name:<12}{value}")

# %% [markdown]
# On v5e and v6e a chip is one core. `torch_xla` "installed" says nothing about a TPU: the package
# also runs on a CPU, which is what these lessons do where there is no TPU.

# %% [markdown]
# ## The verdict

# %%
CLICK = {
    "Colab": "Runtime > Change runtime type > v5e-1 TPU > Save, then run this notebook again",
    "Kaggle": "Settings > Accelerator > TPU v5e-8, then run this notebook again",
    "own machine": "open this notebook in Colab or Kaggle with a badge above",
}


def verdict(found):
    """What the machine is good for, and what to do next."""
    if found["TPU chips"]:
        cores = found["TPU chips"]
        more = "" if cores > 1 else " (eight cores: Kaggle)"
        return f"TPU with {cores} core{'s' if cores > 1 else ''}{more}. Next: lesson 02"
    if found["CUDA GPUs"]:
        text = "A GPU: the package trains on it with --device cuda. The lessons use the CPU here"
    else:
        text = "No accelerator. Every lesson runs here on the CPU, made small"
    return f"{text}.\nFor a TPU: {CLICK[found['place']]}."


print(verdict(found))

# %% [markdown]
# **What just happened.** Nothing was opened, so a training run in another process can use the TPU.
# The same function for machines you may meet:

# %%
for example in (
    {"place": "Colab", "TPU chips": 1, "CUDA GPUs": 0},
    {"place": "Colab", "TPU chips": 0, "CUDA GPUs": 0},
    {"place": "Kaggle", "TPU chips": 8, "CUDA GPUs": 0},
    {"place": "Kaggle", "TPU chips": 0, "CUDA GPUs": 2},
):
    print(example["place"], "·", verdict(example), "\n")

# %% [markdown]
# ## Variables left over from elsewhere
#
# Some images carry settings of a larger TPU slice. `TPU_PROCESS_ADDRESSES` is the known one: on
# Kaggle it has led to "Expected 4 worker addresses, got 1" when the TPU is opened, and removing it
# is the [reported cure](https://github.com/huggingface/transformers/issues/28204). `PJRT_DEVICE`
# chooses the platform (lesson 02). Look at what is set before blaming the hardware:

# %%
names = [name for name in sorted(os.environ) if name.startswith(("TPU_", "PJRT_", "XLA_"))]
for name in names:
    print(f"{name}={os.environ[name]}")
print(f"{len(names)} variables set")
# If opening the TPU fails as above: os.environ.pop("TPU_PROCESS_ADDRESSES", None), in a new kernel

# %% [markdown]
# ## Exercise
#
# MSHNet's first feature maps have 16 channels at 256×256. In bfloat16 a value takes 2 bytes. The
# TPU compiler lays the **batch** of these maps over the 128 lanes and fills it up.
#
# Write `map_bytes(batch)`: the bytes of one such map in TPU memory. Then answer: how many times as
# expensive is an *image* at batch 32 as at batch 128? How many maps of a batch of 128 fit into the 16 GB
# of a v5e?


# %% tags=["exercise"]
def map_bytes(batch, channels=16, size=256, bytes_a_value=2):
    """Bytes of a (batch, channels, size, size) map whose batch lies in the lanes."""
    ...  # your code; LANES is 128


times_as_dear = ...  # an image at batch 32, compared with one at batch 128
maps_that_fit = ...  # whole maps of a batch of 128 in 16 GB (16e9 bytes)

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("A batch that does not fill the lanes pays for them all the same.") as expect:
    expect.answered(map_bytes=map_bytes(128))
    full, part, over = (map_bytes(batch) for batch in (128, 32, 129))
    expect(full == 2**28, f"a map of 128 images has 128 × 16 × 256 × 256 × 2 bytes, not {full:,}")
    expect(part == full, f"32 images are padded to 128: {full:,} bytes, not {part:,}")
    expect(over == 2 * full, f"129 images are padded to 256: {2 * full:,} bytes, not {over:,}")
    expect.answered(times_as_dear=times_as_dear, maps_that_fit=maps_that_fit)
    expect(
        times_as_dear == 4, f"the same map for a quarter of the images: not {times_as_dear} times"
    )
    expect(maps_that_fit == 59, f"16e9 bytes divided by map_bytes(128): not {maps_that_fit}")


# %% tags=["solution"]
# @title Solution (open after trying)
def map_bytes(batch, channels=16, size=256, bytes_a_value=2):
    """Bytes of a (batch, channels, size, size) map whose batch lies in the lanes."""
    padded = -(-batch // LANES) * LANES  # rounded up to a multiple of 128
    return padded * channels * size * size * bytes_a_value


for batch in (32, 128):
    image = map_bytes(batch) / batch
    print(
        f"batch {batch:3}: {map_bytes(batch) / 2**20:.0f} MiB a map, {image / 2**20:.0f} MiB "
        f"an image, {100 * used(batch):.0f} % of it data"
    )
times_as_dear = (map_bytes(32) / 32) / (map_bytes(128) / 128)
maps_that_fit = int(16e9 // map_bytes(128))

# %% [markdown] tags=["solution"]
# The map costs the same for 32 images as for 128. So an image is four times as expensive at batch 32,
# in memory and in the time it takes to move it. This is why a batch of 128 in bfloat16 suits a
# single v5e core, and why 32 images spread over eight cores, four on each, fill so little. The
# whole network does better than this one map: its deeper levels have more channels, which lie in
# the lanes. And this package moves columns of a map into channels (space-to-depth), so that small
# batches fill the lanes, too (`mshnet/space_to_depth.py`). Lesson 09 gets the total from the real TPU compiler.

# %% [markdown]
# ## Recap
#
# * A TPU needs large matrix products and fixed shapes; XLA compiles a step once for each shape, and
#   an axis that does not fill 128 lanes is padded and paid for in full.
# * Colab gives one core (v5e-1, paid v6e-1), Kaggle eight (v5e-8), a Cloud TPU VM eight and more. A
#   GPU is better for short, irregular or experimental work.
# * `runtime.tpu_chips()` counts chips without opening them, because only one process may.
#
# **Next:** lesson 02, install and verify.
