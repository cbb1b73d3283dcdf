# %% [markdown]
# # 11 · A super-resolution GAN
#
# **Two networks and two optimizers in one compiled step, whole frames without seams, and an honest
# answer to whether enlarging infrared frames helps a detector.**
#
# {{badges}}
#
# {{time: 30 min on v5e-1}}
#
# **You will be able to**
#
# * write a generator and a discriminator that XLA likes, and a perceptual loss without downloads;
# * train both in one step that is compiled once, with a batch and a rate that grow together;
# * stop a GAN's training anywhere, and go on as if nothing had happened;
# * enlarge frames of any size by one program, and see no seams;
# * compare devices, and say what was not there;
# * ask whether super-resolution helps a detector, and read the answer with its uncertainty.
#
# **You need** lesson 04 (what a step is) and lesson 07 (the report that counts programs). Any
# runtime. The lab is source document 2, Fast-SRGAN with TPU support, for infrared frames. Without a
# TPU everything is small: the pictures are modest, the counts are the same.

# %% [markdown]
# ## Setup
#
# Nothing is installed beyond the package: Colab's TPU runtime has scikit-image (PSNR, SSIM), and
# torchvision for those who own VGG's weights. The lab's code is in the repository beside the
# package, so the second cell fetches that where it is not there.

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

from course import checkout
from tpuscope.engine import torch_xla as runtime

sys.path.insert(0, str(checkout()))

TPU = runtime.tpu_chips() > 0
SMALL = not TPU  # small frames and networks where the CPU does the work
DEVICE = "tpu" if TPU else "cpu"

SIZE = 64 if SMALL else 256  # side of the frames, pixels
CROP = 32 if SMALL else 96  # side of what a step sees
BATCH = 8 if SMALL else 64
WIDTH, BLOCKS = (8, 2) if SMALL else (32, 6)  # of the generator
JUDGE = 8 if SMALL else 64  # channels of the discriminator's first layer
CONTENT_STEPS, STEPS = (160, 240) if SMALL else (3000, 5000)

# %% [markdown]
# ## Does everything work here?
#
# The set-up check tries packages, the device, each operation that the networks are made of (forward
# and backward, compared with the host), and loading a model. It runs in a process of its own, as the
# benchmark further down: one process has one XLA device, and this notebook has not opened it yet.


# %%
def command(*words, **variables):
    """Run `python -m labs.super_resolution …` and show what it says."""
    line = [sys.executable, "-m", "labs.super_resolution", *map(str, words)]
    done = subprocess.run(
        line, cwd=checkout(), env=os.environ | variables, capture_output=True, text=True
    )
    print(done.stdout or done.stderr)
    return done.returncode


assert command("check", "--device", DEVICE) == 0

# %% [markdown]
# ## What a coarser sensor sees
#
# A pixel of a sensor integrates over its area. So a frame of half the resolution is the frame with
# 2 × 2 pixels averaged, rounded to 8 bits again. The scenes are the built-in ones of the course,
# drawn from a seed; `pairs` takes a data set's folder, too.

# %%
from labs.super_resolution import frames, quality

train = frames.pairs(None, "train", SIZE, count=64 if SMALL else 400)
test = frames.pairs(None, "test", SIZE, count=32 if SMALL else 100)
truth, mask = test[2]
low = frames.shrunk(truth, 2)
print(truth.shape, "→", low.shape)

# %% [markdown]
# ## Two networks
#
# The **generator** enlarges, the **discriminator** tells enlarged frames from real ones, patch by
# patch. Both follow the SRGAN paper (Ledig et al. 2017), with Fast-SRGAN's change: the blocks are
# MobileNetV2's inverted residuals, whose 3×3 convolutions look at one channel each.
#
# One thing is ours. The generator computes a *correction* to bicubic interpolation, and its last
# layer begins at zero. And because PyTorch's bicubic has no XLA version off TPU, it is written with
# the two operations that the generator has anyway: a convolution, and a pixel shuffle.

# %%
import torch
from torch import nn
from torch.nn import functional as F

from labs.super_resolution.networks import Bicubic, Discriminator, Generator, InvertedResidual

x = torch.rand(1, 1, 24, 20)
expected = F.interpolate(x, scale_factor=2, mode="bicubic")
assert torch.allclose(Bicubic(2)(x), expected, atol=1e-5), "borders included"
with torch.no_grad():
    assert torch.allclose(Generator(scale=2)(x), expected, atol=1e-5), "untrained, it is bicubic"


def count(module):
    return sum(p.numel() for p in module.parameters())


plain = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 128, 3, padding=1))
print(f"two plain convolutions of 128 channels   {count(plain):>9,} parameters")
print(f"inverted residual, 32 channels to 128    {count(InvertedResidual(32, 4)):>9,}")
print(f"generator, 6 blocks                      {count(Generator()):>9,}")
print(f"discriminator, the paper's width         {count(Discriminator()):>9,}")

# %% [markdown]
# **What just happened.** The generator is small, the discriminator large: it is needed in training
# only. Training starts from bicubic interpolation and not from noise, so that even a short one has
# something to show; and whatever the numbers below say, they are about what was *learned*.

# %% [markdown]
# ## A perceptual loss without downloads
#
# The mean difference of pixels does not mind blur. So the paper adds a second loss: the difference
# of two frames in the maps of a network, VGG, trained on millions of photographs. Here the default
# is a network of VGG's kind that was **never trained**, its weights drawn from a seed. Liu et al.
# (CVPR 2021) found that what such a loss needs is the structure of the network. Does it do the job?
# Three ways to spoil a frame, by the same mean difference of pixels:

# %%
from labs.super_resolution.losses import FixedFeatures, perceptual_loss

features = FixedFeatures()
rows = []
for frame, _ in test[:8]:
    real = torch.from_numpy(frame)[None, None] / 255
    blurred = torch.from_numpy(quality.bicubic(frames.shrunk(frame, 2), 2))[None, None] / 255
    error = (blurred - real).abs().mean()
    noise = torch.randn(real.shape, generator=torch.Generator().manual_seed(0))
    spoilt = (blurred, real + noise * error / noise.abs().mean(), real + error)
    rows.append([perceptual_loss(features, one, real) for one in spoilt])
blur, noise, brighter = torch.tensor(rows).mean(0)
print(f"blurred {blur:.4f}   noisy {noise:.4f}   brighter {brighter:.4f}")
assert blur > noise > brighter

# %% [markdown]
# **What just happened.** For pixels all three are equally bad. The untrained features mind the blur
# most, and the changed brightness least. If you have VGG19's weights as a file, `--vgg FILE` takes
# the paper's loss instead.

# %% [markdown]
# ## Every device that is here
#
# `benchmark` times the same GAN step and the same frame on each device, in a process each, and says
# which ones are absent. Ratios to eager PyTorch on this machine's CPU:

# %%
shapes = {"size": 64, "crop": CROP, "batch-size": 4, "width": 4, "blocks": 1} if SMALL else {}
shapes |= {"discriminator-width": 4 if SMALL else 64, "steps": 3}
assert command("benchmark", *(word for k, v in shapes.items() for word in (f"--{k}", v))) == 0

# %% [markdown]
# **What just happened.** Read the ratios as those of *this* machine, for networks this small. XLA
# on a CPU is there to try programs, not to be fast. The first two steps are tracing and compiling,
# and on XLA they cost more than many steps.

# %% [markdown]
# ## Two optimizers, one program
#
# A GAN step updates the discriminator, then the generator against the updated discriminator. Ported
# from a GPU, it often becomes several programs: a sync between the two updates, a loss that is
# printed, an optimizer whose state is made in the first step. Here all of it is one trace. The
# budget says how much compiling and reading is allowed.

# %%
if not TPU:
    os.environ["PJRT_DEVICE"] = "CPU"  # XLA on the CPU

from labs.super_resolution.training import LOSSES, Gan, Settings, open_backend, scaled_rate
from tpuscope import Budget, watch

shape = {"size": SIZE, "crop": CROP, "batch_size": BATCH, "width": WIDTH, "blocks": BLOCKS}
settings = Settings(**shape, discriminator_width=JUDGE, device="tpu")
gan = Gan(settings, open_backend("tpu"))
_, step = gan.compiled_steps()
samples = frames.Crops([frame for frame, _ in train], CROP, seed=0)

with watch(budget=Budget(compilations=1, fallbacks=0, host_reads=0)) as w:
    sums = gan.backend.to_device(torch.zeros(len(LOSSES)))
    for [high] in gan.backend.device_batches(frames.crop_loader(samples, 0, 4, BATCH)):
        [sums] = step(high, sums)
print(w.report())
print(dict(zip(LOSSES, (sums.cpu() / 4).tolist())))

assert [one.programs for one in w.steps] == [1, 1, 1, 1] and w.report().compilations == 1

# %% [markdown]
# **What just happened.** Four steps, one program, compiled once, nothing read. Two details made it
# so; both are in `labs/super_resolution/training.py`. Adam counts its steps in a Python number and
# computes with it, which would be other numbers in every step: `capturable=True` keeps the count on
# the device. And Adam makes its sums in the first step, where they would be zeros of the graph: here
# they are made on the host before. The losses are added up on the device and read now and then.

# %% [markdown]
# ## Batch and rate grow together
#
# A TPU needs large batches, and a larger batch needs a larger learning rate. The lab's `--lr` is for a batch
# of 16, as in the paper, and is scaled in proportion.

# %%
for batch in (16, 64, 128):
    print(f"batch {batch:>3}: learning rate {scaled_rate(1e-4, batch):.1e}")
assert scaled_rate(1e-4, 128) == 8 * scaled_rate(1e-4, 16)

# %% [markdown]
# The linear rule was found for SGD. For Adam there are arguments for the square root, so take it as
# a starting point, and a lower `--lr` if the losses jump.
#
# ## Train, stop, go on
#
# First the generator alone, by its pixels; then the game. A session ends in the middle; the same
# run goes on from its checkpoint. The command for this is
# `python -m labs.super_resolution train --save-dir DIR`, and `--resume DIR`.

# %%
import shutil
import tempfile
from pathlib import Path

from labs.super_resolution import pictures, training

WORK = Path(tempfile.mkdtemp(prefix="lab-11-"))
run_folder = WORK / "generator-0"
request = shape | {"discriminator_width": JUDGE, "device": DEVICE, "steps": STEPS, "lr": 2e-3}
request |= {"content_steps": CONTENT_STEPS, "log_every": STEPS // 12, "save_dir": str(run_folder)}
request |= {"perceptual": 0.02}

wanted = iter([None] * (CONTENT_STEPS + STEPS // 10))  # after so many steps: please stop
first = training.train(request, stop=lambda: next(wanted, "SIGTERM"))
print("stopped by", first.stopped, "after step", first.step)

second = training.train({}, resume=run_folder)
assert second.step == STEPS and second.stopped is None
print(*sorted(path.name for path in run_folder.iterdir()))

# %%
pictures.curves(second.records)

# %% [markdown]
# **What just happened.** The second process knew the settings, both networks, both optimizers and
# the step; the crops follow from seed and step. So the result is bit for bit that of a run that was
# never stopped (`tests/labs/test_super_resolution.py`). One process writes, under a temporary name
# that is renamed when the file is whole.
#
# At the dotted line the game begins. Look at the right: a discriminator that cannot tell answers
# one half to both. Losses of a GAN say who is winning, not how good the frames are. For that:
#
# ## Whole frames, without seams
#
# XLA compiles a program for every shape, and frames come in all sizes. So a frame is cut into tiles
# of one size, and the last batch is filled up. Tiles overlap: the outermost pixels of each are thrown
# away, because they were computed without their neighbours, and the next ones fade into the other
# tile. Is that enough? A frame of an odd size, once in tiles and once whole:

# %%
import numpy as np

from labs.super_resolution.tiles import Tiling, Upscaler, upscale
from labs.super_resolution.training import load_generator

generator, _ = load_generator(run_folder)
odd = frames.pairs(None, "test", 128, count=1)[0][0][:101, :77] / np.float32(255)
with torch.no_grad():
    whole = generator(torch.from_numpy(odd)[None, None])[0, 0].numpy()


def difference(tiling):
    """Largest difference to the whole frame, in grey levels."""
    with torch.no_grad():
        return 255 * np.abs(upscale(odd, generator, 2, tiling) - whole)[16:-16, 16:-16].max()


bare, blended = difference(Tiling(32, margin=0, blend=0)), difference(Tiling(32, 6, 4))
print(f"tiles side by side: {bare:.1f} grey levels   with margin and blending: {blended:.2f}")
assert blended < bare / 3

# %% [markdown]
# **What just happened.** Inside the frame nothing of the seams is left that could be seen. For a
# generator that looks no further than the margin it is exact: the tests reproduce bicubic
# interpolation for frames of every size, down to a single pixel.
#
# ## Better than bicubic?
#
# PSNR and SSIM on test scenes, frame by frame: shrunk, enlarged again, compared with what they were.

# %%
from labs.super_resolution.training import CONTENT

backend = open_backend(DEVICE)
tiling = Tiling(tile=SIZE // 2 + 16, margin=4, blend=4)
content, srgan = (
    Upscaler(load_generator(path)[0], backend, tiling)
    for path in (run_folder / CONTENT, run_folder)
)
scores = quality.compare([frame for frame, _ in test], 2, content=content, srgan=srgan)
print(quality.table(scores))

assert scores["content"]["psnr"] > scores["bicubic"]["psnr"]

# %%
versions = {"low resolution": low, "bicubic": quality.bicubic(low, 2), "SRGAN": srgan(low)}
pictures.comparison(versions | {"truth": truth}, mask)

# %% [markdown]
# **What just happened.** The generator beats bicubic interpolation, by a little and on nearly every
# frame: edges of clouds and walls are sharper. It cannot make the sensor's noise, nor a hot pixel:
# they are in the truth, not in the low-resolution frame, and nobody could predict them. Compare the
# last two rows: the paper's GAN gave PSNR away for texture that looks right; in a run this
# short, with the paper's small weight for the game, the generator may simply have gone on learning.
#
# ## Does it help MSHNet find targets?
#
# Here is the question that a pretty picture does not answer. A detector is shown what a finer sensor
# would give (*full*), and a coarser one's frames enlarged in several ways. One detector was trained
# on full frames; another on the low-resolution frames as they are (*low*), with its logits enlarged
# afterwards. All are scored on the same full-size masks.

# %%
from labs.super_resolution import detect

experiment = detect.Experiment(
    Settings.from_dict(request),
    trained_on=("low",),
    epochs=12 if SMALL else 60,
    widths=(8, 8, 16, 16, 16) if SMALL else (16, 32, 64, 128, 256),
    train=len(train),
    test=len(test),
)
found = detect.run(experiment, backend, WORK, seeds=1)
print(detect.table(found))

# %% [markdown]
# **What just happened.** One seed, a few scenes, a short run: it shows how the question is asked,
# not its answer. Read it so: a difference between two rows means something only if it is larger than
# what another seed changes. For an answer take real frames, trained detectors and several seeds:
#
# ```
# python -m labs.super_resolution detect --dataset-dir datasets/SIRST --seeds 3
# ```
#
# A measurement of that kind, with its command and its table, is in `labs/super_resolution/detect.py`:
# real SIRST frames, 40 epochs, three seeds. With two of the seeds the detectors had not learned to
# detect by then, on full frames either, which is an answer too: one training run is no evidence. With the
# third, full frames gave an IoU of 54.5 %, and the enlarged ones 43.6 (bicubic) and 43.2 (SRGAN),
# although SRGAN had the better PSNR by 1.1 dB. The same detector found somewhat more targets in
# SRGAN's frames (93.8 against 90.0 %), with more false alarms (220 against 137 in a million pixels).
# Detectors retrained on those frames found as many in bicubic frames (93.8 %, with 184), and 95.3 % in SRGAN's,
# with 306 and less IoU.
#
# **Enlarging adds no measurement.** Train a detector on what the sensor gives, to the end, before you
# put a generator in front of one.

# %% [markdown]
# ## Several cores
#
# `--tpu-cores 8` trains on eight cores. The source document spawns eight processes for that. Today
# `nprocs=8` is refused, and there is a better way: **SPMD**, one program over all cores. The batch
# is split, the networks are replicated, the compiler adds the reductions for both optimizers, and
# batch norm sees the whole batch. The step above needs no other line. Two virtual cores, without a
# TPU:

# %%
tiny = ("--size", 32, "--crop", 16, "--width", 4, "--blocks", 1, "--discriminator-width", 4)
run = ("--steps", 4, "--content-steps", 2, "--log-every", 2, "--save-dir", WORK / "cores")
words = ("train", "--device", "tpu", "--tpu-cores", 2, "--batch-size", 4, *tiny, *run)
assert command(*words, PJRT_DEVICE="CPU") == 0

# %% [markdown]
# ## Exercise
#
# A discriminator that wins too easily gives no useful gradient. A common fix: train it only while its loss is
# above a limit. The function below does that, and it works, on a GPU. On XLA it reads a value in
# every step, and is two programs. **Fix `judge_step` so that one program does both cases, with
# nothing read.** Its optimizer is SGD: no gradient, no change.


# %% tags=["exercise"]
from labs.super_resolution.losses import discriminator_loss


def judge_step(judge, optimizer, real, made, limit):
    """Train the discriminator if its loss is above the limit. Returns the loss, on the device.

    `limit` is a tensor (1,) on the device.
    """
    optimizer.zero_grad()
    loss = discriminator_loss(judge(real), judge(made))
    if loss > limit:  # fix this
        loss.backward()
        optimizer.step()
    return loss.detach()


device = runtime.device()
judge = nn.Conv2d(1, 1, 3).to(device)
optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
with watch() as w:
    for limit in (0.1, 9.0, 0.1):
        real, made, limit = (
            t.to(device) for t in (*torch.rand(2, 2, 1, 8, 8), torch.tensor([limit]))
        )
        judge_step(judge, optimizer, real, made, limit)
        runtime.sync()
print(w.report())

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
import copy

from course import checking


def tried(limits):
    """Weights after a step for each limit, a reference's, and the report."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3))
    data = [(torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)) for _ in limits]
    on_device, on_host = copy.deepcopy(start).to(device), copy.deepcopy(start)
    optimizer = torch.optim.SGD(on_device.parameters(), lr=0.1)
    reference = torch.optim.SGD(on_host.parameters(), lr=0.1)
    inputs = [
        [t.to(device) for t in (*pair, torch.tensor([limit]))] for pair, limit in zip(data, limits)
    ]
    runtime.sync()
    with watch() as w:
        for real, made, limit in inputs:
            judge_step(on_device, optimizer, real, made, limit)
            runtime.sync()
    for (real, made), limit in zip(data, limits):
        reference.zero_grad()
        loss = discriminator_loss(on_host(real), on_host(made))
        if loss.item() > limit:
            loss.backward()
            reference.step()
    weights = [
        torch.cat([p.detach().cpu().flatten() for p in n.parameters()])
        for n in (on_device, on_host)
    ]
    return *weights, w.report()


with checking("One program, whoever is winning.") as expect:
    got, expected, report = tried([0.1, 9.0, 0.1, 9.0])
    expect(
        report.host_reads == 0,
        f"{report.host_reads} values were read in 4 steps; the report says: {report.verdicts[0]}",
    )
    expect(
        report.compilations <= 1,
        f"{report.compilations} compilations in 4 steps; the report says: {report.verdicts[0]}",
    )
    tolerance = 0.02 if TPU else 1e-4
    expect(
        bool((got - expected).abs().max() < tolerance),
        "the weights are not those of training above the limit and resting below it",
    )


# %% tags=["solution"]
# @title Solution (open after trying)
def judge_step(judge, optimizer, real, made, limit):
    """The condition is data: the loss times 0 or 1, and so its gradients."""
    optimizer.zero_grad()
    loss = discriminator_loss(judge(real), judge(made))
    (loss * (loss.detach() > limit)).sum().backward()
    optimizer.step()
    return loss.detach()


# %% [markdown] tags=["solution"]
# The step computes the gradients in either case, which is what an XLA program does with any
# `where`. With Adam a gradient of 0 is still a step, by its running mean; there, keep the old weights
# with `torch.where` instead.

# %%
shutil.rmtree(WORK)

# %% [markdown]
# ## Recap
#
# * Depthwise convolutions, pixel shuffle, and bicubic as a convolution: fixed shapes, and no
#   operation that runs on the host. A fixed, seeded network gives a perceptual loss without downloads.
# * Both updates belong into one trace. `capturable=True`, Adam's sums made before the first step,
#   losses added up on the device; `Budget` holds the step to one compilation. The rate grows with
#   the batch.
# * A checkpoint has both networks, both optimizers and the step; what is random follows from the
#   step. One process writes.
# * Tiles of one size, with a margin that is thrown away and a window that blends: one program for
#   frames of every size.
# * `check` and `benchmark` run in processes of their own, and name what is absent.
# * PSNR is not the question. Ask the detector, train one on the low-resolution frames beside it, and
#   repeat with other seeds before you believe a difference.
#
# **Next:** lab 12, text generation with static shapes.
