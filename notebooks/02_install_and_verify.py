# %% [markdown]
# # 02 · Install and verify
#
# **Check that torch and torch_xla belong together, open the device, and make sure that it computes
# the right thing.**
#
# {{badges}}
#
# {{time: 12 min on v5e-1}}
#
# **You will be able to**
#
# * tell which versions are installed, and why you should not change them in Colab;
# * install the pair on an empty machine;
# * find out with one call what works on a machine and how to fix the rest;
# * verify a device: a matrix product, a training step with gradients, the cost of the first run;
# * recognise calls from old TPU guides and write today's.
#
# **You need** lesson 01 (a runtime). Without a TPU the same cells run XLA on the CPU.

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
# ## What is installed
#
# Colab's TPU runtime brings all it needs. The middle column is its published list of August 2026.

# %%
import platform
from importlib import metadata

COLAB = {
    "torch": "2.9.0",
    "torch_xla": "2.9.0",
    "libtpu": "0.0.21.1",  # the TPU driver and compiler; only where there is a TPU to drive
    "jax": "0.7.2",  # used in lesson 09, not for training
    "numpy": "2.1.3",
}


def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "–"


print(f"{'':<12}{'Colab TPU':<12}here")
print(f"{'Python':<12}{'3.13':<12}{platform.python_version()}")
for name, colab in COLAB.items():
    print(f"{name:<12}{colab:<12}{version(name)}")

# %% [markdown]
# ## The pair
#
# `torch_xla` is compiled against the C++ inside `torch`. With another minor version the import ends
# in an "undefined symbol". So **do not install torch or torch_xla over what a TPU runtime brings**,
# and beware of packages that do it for you: a plain `pip install something` that requires another
# torch replaces it. This is why the setup cell says `--no-deps`.
#
# The package has a gate for this. It reads the two versions before torch_xla is imported:

# %%
from tpuscope.engine import torch_xla as runtime

runtime.require_matching_versions()
print("torch", version("torch"), "and torch_xla", version("torch_xla"), "belong together")

# %% [markdown]
# What happens when they do not match? **A demonstration**: the next cell makes Python *report*
# another version, and then no torch_xla at all. Nothing is changed on the machine.

# %%
from unittest import mock


def message_of(*patches):
    """The gate's message while the patches hold."""
    for patch in patches:
        patch.start()
    try:
        runtime.require_matching_versions()
    except runtime.XlaUnavailable as error:
        return str(error)
    finally:
        mock.patch.stopall()


wrong = message_of(mock.patch("importlib.metadata.version", return_value="2.8.0"))
absent = message_of(mock.patch.object(runtime, "installed", return_value=False))
print("another version:", wrong, end="\n\n")
print("not installed:  ", absent)
assert "2.8.0 do not belong together" in wrong and "not installed" in absent
runtime.require_matching_versions()  # the patches are gone

# %% [markdown]
# **What just happened.** Both messages name the fix. In Colab the fix is a fresh machine (Runtime >
# Disconnect and delete runtime), because it comes back with the pair it was built with.

# %%
from course import clicks

clicks(
    (
        "Runtime",
        ["Interrupt execution", "Restart session", "Disconnect and delete runtime"],
        "Disconnect and delete runtime",
    ),
    ("Files of the session will be gone", ["Cancel", "Yes"], "Yes"),
)

# %% [markdown]
# ## On an empty machine
#
# A Linux machine with Python 3.11 to 3.13. A line each, in a shell:
#
# ```
# pip install torch==2.9.0 torch_xla==2.9.0                          # XLA on the CPU
# pip install "mshnet[tpu] @ git+{{repository}}"     # all of it, with libtpu for a TPU VM
# ```
#
# The extra `tpu` adds `libtpu`, in the version that has a wheel for your Python.
# (`torch_xla[tpu]` pins libtpu 0.0.21, which has none for Python 3.13; the extra takes 0.0.21.1
# there, as Colab does.) 2.9 is the last PyTorch/XLA release, so there is no newer pair to look for.
#
# ## All at once: the doctor
#
# The package has a call that checks all of this and more: versions, imports, variables that old
# guides or larger machines leave behind, memory, disks, Drive. It also tries each device, which is
# what the rest of this lesson does by hand.

# %%
from tpuscope.doctor import doctor

report = doctor()
assert report.usable, report

# %% [markdown]
# **What just happened.** One line for each check, the fix below it, a verdict at the end. The lines
# "agrees with the host" were computed in processes of their own. So this kernel has opened nothing
# yet, and a runtime that hangs or crashes would have been a line too. In a terminal, or where no
# notebook starts, the same is `mshnet doctor`.
#
# ## Which platform: `PJRT_DEVICE`
#
# PJRT is the layer between torch_xla and a device. The environment variable `PJRT_DEVICE` chooses:
# `TPU`, or `CPU` for the same compiler front on the host. It is read when the device is opened, so
# it has to be set before that; changing it later needs a new kernel. If it is not set, torch_xla
# takes a TPU if it sees one, else the CPU with a warning.

# %%
import os
import time

TPU = runtime.tpu_chips() > 0
if not TPU:
    os.environ["PJRT_DEVICE"] = "CPU"  # said aloud, so that nothing is guessed

start = time.perf_counter()
import torch
import torch_xla

print(f"import: {time.perf_counter() - start:.1f} s")
start = time.perf_counter()
device = torch_xla.device()  # from here on this process holds the device
print(f"open:   {time.perf_counter() - start:.1f} s")
print(f"{runtime.describe()} · this is {device} · PJRT_DEVICE={runtime.requested_platform()}")

# %% [markdown]
# ## Does it compute the right thing?
#
# Compare a matrix product with the host. As error we take the length of the difference over the
# length of the right answer.
#
# How much error is normal? **A TPU multiplies in bfloat16.** The default for a float32 product is
# one pass: the factors are rounded to bfloat16 (8 significant bits), the sums are kept in float32.
# The setting "highest" takes six passes and comes close to float32
# (`torch_xla.backends.set_mat_mul_precision("highest")`, once, at the start of a program). The CPU
# multiplies in float32. So before we compare, we work out on the host what the rounding alone does:

# %%
torch.manual_seed(0)


def relative_error(value, reference):
    """Length of the difference over length of the reference; both as float32 on the host."""
    value, reference = value.detach().float().cpu(), reference.detach().float().cpu()
    return ((value - reference).norm() / reference.norm()).item()


def rounded(tensor):
    return tensor.to(torch.bfloat16).float()


a, b = torch.randn(512, 512), torch.randn(512, 512)
reference = a @ b
rounding = relative_error(rounded(a) @ rounded(b), reference)
error = relative_error(a.to(device) @ b.to(device), reference)
print(f"expected of one bfloat16 pass: {rounding:.1e}")
print(f"measured on this device:       {error:.1e}")

TOLERANCE = 10 * rounding if TPU else 1e-4  # room for a few products in a row
assert error < TOLERANCE, error

# %% [markdown]
# **What just happened.** The first number is the error that bfloat16 rounding alone causes: a healthy TPU may have it. The
# second is this device's error. The tolerance follows the platform: loose on a TPU, tight
# where products are float32. A wrong result, from a broken install, would be off by about 1.
#
# ## A training step
#
# A product alone says little about training. Here is a small network with convolutions, a batch
# norm, a loss and gradients, with the same weights and data on both sides.

# %%
import copy

from torch import nn

host_net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 1, 3, padding=1),
)
device_net = copy.deepcopy(host_net).to(device)
images = torch.randn(8, 1, 64, 64)
targets = (torch.rand(8, 1, 64, 64) > 0.99).float()


def gradients(net, images, targets):
    """Loss and gradients of one step; the same code on either side."""
    net.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(net(images), targets)
    loss.backward()
    torch_xla.sync()  # XLA: compile if new, and run; nothing to do for tensors of the host
    return {"loss": loss} | {name: p.grad for name, p in net.named_parameters()}


expected = gradients(host_net, images, targets)
before, seconds, compiled = runtime.counters(), [], []
for _ in range(4):
    start = time.perf_counter()
    got = gradients(device_net, images.to(device), targets.to(device))
    got["loss"].cpu()  # waits for the device
    seconds.append(time.perf_counter() - start)
    compiled.append((runtime.counters() - before).compilations)
    before = runtime.counters()

# %%
# The convolution before the batch norm has a bias without effect: its gradient is only rounding.
compared = [name for name in expected if name != "0.bias"]
for name in compared:
    error = relative_error(got[name], expected[name])
    print(f"{name:<9}{error:.1e}")
    assert error < TOLERANCE, (name, error)

# %% [markdown]
# **What just happened.** Loss and gradients agree with eager PyTorch within the tolerance. One name
# is left out: a bias right before a batch norm is subtracted again by it, so its true gradient is
# zero, and a relative error of zero says nothing.
#
# ## The first run and the others
#
# The four steps were timed:

# %%
for number, (took, graphs) in enumerate(zip(seconds, compiled, strict=True), start=1):
    print(f"step {number}: {1000 * took:7.1f} ms, {graphs} compiled")
print(f"the first took {seconds[0] / min(seconds[1:]):.0f} times as long as the best of the others")
assert compiled[0] > 0 and compiled[1:] == [0, 0, 0], compiled

# %% [markdown]
# **What just happened.** The first step was compiled, the others were not. That the counter says 0
# for them is the test that a runtime works as it should; the times only follow from it. The whole
# of MSHNet is a much larger graph and its first step can take minutes, so do not stop it early.
#
# ## Old calls, today's names
#
# Most TPU guides were written for PyTorch/XLA 1.x. What they say, and what to write:
#
# | old | today |
# |---|---|
# | `xm.xla_device()` | `torch_xla.device()` |
# | `xm.xrt_world_size()` | `torch_xla.runtime.world_size()`, or `global_runtime_device_count()` |
# | `xm.get_ordinal()` | `torch_xla.runtime.global_ordinal()` |
# | `xm.mark_step()` | `torch_xla.sync()`, or `with torch_xla.step():` |
# | `xmp.spawn(fn, nprocs=8)` | `torch_xla.launch(fn)`, which takes every core (`debug_single_process=True`: one) |
# | spawning after using the device | a process of its own, or SPMD (lesson 05) |
# | `pl.ParallelLoader(loader, [device])` | `MpDeviceLoader(loader, device)` |
# | `if xm.is_master_ordinal(): xm.save(…)` | `xm.save(…)` on all: it ends the step, and one replica alone can deadlock |
# | "no mixed precision on TPU" | `torch.autocast("xla", dtype=torch.bfloat16)` |
#
# Do not take our word for it. The next cell makes the calls:

# %%
import warnings

import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr


def attempt(call):
    """What a call does: its error or its warnings, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except (AttributeError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(warning.message) for warning in caught) or "works"


def product_in_autocast():
    with torch.autocast("xla", dtype=torch.bfloat16):
        x = torch.ones(8, 8).to(device)
        assert (x @ x).dtype == torch.bfloat16


def nothing(index):
    """A training function that would be started on each core."""


calls = {
    "xm.xrt_world_size()": lambda: xm.xrt_world_size(),
    "xr.world_size()": lambda: xr.world_size(),
    "xm.get_ordinal()": lambda: xm.get_ordinal(),
    "xr.global_ordinal()": lambda: xr.global_ordinal(),
    "xm.mark_step()": lambda: xm.mark_step(),
    "torch_xla.sync()": lambda: torch_xla.sync(),
    "xmp.spawn(f, nprocs=8)": lambda: xmp.spawn(nothing, nprocs=8),
    "torch_xla.launch(f)": lambda: torch_xla.launch(nothing),
    "torch.autocast": product_in_autocast,
}
results = {name: attempt(call) for name, call in calls.items()}
for name, result in results.items():
    print(f"{name:<24}{result}\n")
assert results["xm.xrt_world_size()"].startswith("AttributeError")
assert results["xmp.spawn(f, nprocs=8)"].startswith("ValueError")
assert "already initialized" in results["torch_xla.launch(f)"]
assert results["torch_xla.sync()"] == results["torch.autocast"] == "works"

# %% [markdown]
# **What just happened.** Two calls are gone and one warns. Eight processes are refused whatever the
# machine has. And `torch_xla.launch`, which is right, fails *here*: this kernel has opened the
# device above, and new processes could not open it again. That is the "Runtime is already
# initialized" which notebooks are known for. The cure is a process of its own: restart the kernel
# (so that it lets go of the TPU), and start the training with `!mshnet train …`.

# %% [markdown]
# ## Exercise
#
# bfloat16 has the range of float32 but only 8 significant bits. Write `bfloat16_error(n)`: multiply
# two n×n matrices from `torch.randn` **in bfloat16 on the device** and return the relative error against the
# float32 product on the host. Guess first: does the error grow with n?


# %% tags=["exercise"]
grows_with_n = ...  # True or False: your guess


def bfloat16_error(n):
    """Relative error of an n×n product in bfloat16 on the device, against float32 on the host."""
    ...  # your code; relative_error(value, reference) is above


# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("The error stays the same, so bfloat16 is fit for products.") as expect:
    expect.answered(grows_with_n=grows_with_n, bfloat16_error=bfloat16_error(32))
    for n in (32, 128, 512):
        error = bfloat16_error(n)
        expect(
            1e-3 < error < 1e-2,
            f"bfloat16_error({n}) is {error:.1e}; two factors with 8 significant bits are off by "
            "2e-3 to 5e-3. Smaller: the product was taken in float32, or the entries are not centred "
            "on 0 (use randn). Larger: compare with a @ b.",
        )
    expect(grows_with_n is False, "print bfloat16_error for n = 32, 128 and 512: it does not grow")


# %% tags=["solution"]
# @title Solution (open after trying)
def bfloat16_error(n):
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, n, generator=generator) for _ in range(2))
    product = a.to(device, torch.bfloat16) @ b.to(device, torch.bfloat16)
    return relative_error(product, a @ b)


errors = {n: bfloat16_error(n) for n in (32, 128, 512)}
print({n: f"{error:.1e}" for n, error in errors.items()})
grows_with_n = max(errors.values()) > 1.5 * min(errors.values())

# %% [markdown] tags=["solution"]
# It does not grow: each factor is off by up to 1 in 2⁸ at random, the sums are kept in float32, and
# the errors average out as fast as the sum grows. So bfloat16 is fit for products. It is not fit for
# long running sums, such as a loss over an epoch, and those stay in float32.

# %% [markdown]
# ## Recap
#
# * torch and torch_xla are a pair; `runtime.require_matching_versions()` checks it, and in Colab
#   nothing is installed over it.
# * On an empty machine: `torch==2.9.0 torch_xla==2.9.0`, and the extra `tpu` for libtpu.
# * When something does not work, `mshnet doctor` comes first.
# * A device is verified against eager PyTorch, with a tolerance that knows of bfloat16; the first
#   run compiles, and the counter says 0 for the next.
# * Old names fail in known ways; after a notebook has opened the device, training on several cores
#   starts in its own process.
#
# **Next:** lesson 03, data on Drive.
