# %% [markdown]
# # 08 · Evaluate and look
#
# **Know what IoU, nIoU, Pd and Fa count, why two papers report different values for the same network,
# and see where a detector fails.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * compute every number of a results table by hand, from logits and masks;
# * tell which of three definitions a paper used, and what a change of protocol does to its numbers;
# * choose a threshold for a budget of false alarms, without looking at the test split;
# * find the images that a detector fails on, and show them.
#
# **You need** lesson 04 (one core). Any runtime will do: without a TPU a narrow network is trained
# on the CPU. If you have weights of your own, or the official ones, this lesson evaluates them.

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
from tpuscope.engine import torch_xla as runtime

TPU = runtime.tpu_chips() > 0
SMALL = not TPU  # a narrow network and small images where the CPU does the work
DEVICE = "tpu" if TPU else "cpu"

SIZE = 64 if SMALL else 256  # side of the images, pixels
BATCH = 8 if SMALL else 32
SCENES = 160 if SMALL else 400
EPOCHS = 16 if SMALL else 60
WARM_EPOCH = EPOCHS if SMALL else 5  # on a CPU one head only: it learns sooner
WIDTHS = (8, 8, 16, 16, 16) if SMALL else (16, 32, 64, 128, 256)
DEPTHS = (1, 1, 1, 1, 1) if SMALL else (1, 2, 2, 2, 2)
print(f"{DEVICE}, {SIZE}×{SIZE}, {SCENES} scenes to train on, {EPOCHS} epochs")

# %% [markdown]
# ## Something to evaluate
#
# Name weights that you have, and their data, and they are evaluated. Otherwise a network is trained
# here; it will be mediocre, which suits this lesson.

# %%
import shutil

from mshnet import api
from mshnet.data.scenes import write_scenes

WEIGHTS = None  # such as "/content/drive/MyDrive/runs/first/weight.pkl"
DATA = None  # such as "/content/IRSTD-1k"

data = DATA or str(write_scenes("scenes-08", train=SCENES, test=40, size=SIZE))
settings = {"dataset_dir": data, "device": DEVICE, "batch_size": BATCH}
if WEIGHTS is None:
    shape = {"base_size": SIZE, "crop_size": SIZE, "widths": WIDTHS, "depths": DEPTHS}
    shutil.rmtree("run-08", ignore_errors=True)  # what an earlier pass through this lesson left
    run = {"epochs": EPOCHS, "warm_epoch": WARM_EPOCH, "workers": 0, "save_dir": "run-08"}
    api.train(settings | shape | run)
    weights = "run-08/weight.pkl"
else:
    weights = WEIGHTS
print(weights)

# %% [markdown]
# ## The command's answer
#
# `mshnet test --dataset-dir DIR --weight-path FILE` is this function. It prints a line for each
# definition, and with every line the conditions under which its numbers hold.

# %%
answers = api.test(settings | {"weight_path": weights})

# %% [markdown]
# **What just happened.** Two lines with the same IoU and two different Fa, from the same maps. The
# rest of the lesson takes them apart. For that we want the maps themselves: logits, one number for
# each pixel, above 0 where the network says target.

# %%
import torch

from mshnet import MSHNet
from mshnet.data.layout import DataFolder
from mshnet.data.loader import EvaluationSet, evaluation_loader
from mshnet.data.sample_cache import SampleCache
from mshnet.training import backend as backends
from mshnet.training.checkpoint import load, load_weights
from mshnet.training.evaluation import evaluate
from mshnet.training.step import Normalize

trained = load(weights).get("config", {})  # what our own weight files remember
side = trained.get("base_size", 256)
backend = backends.make_backend(DEVICE)
model = MSHNet(**{name: trained[name] for name in ("widths", "depths") if name in trained})
full = load_weights(model, weights)  # False: only the full-size head is trained
normalize = Normalize()
for module in (model, normalize):
    backend.move(module)


def maps_of(split):
    """Images, masks and logits of a split, (N, 1, side, side) each, on the host."""
    whole = EvaluationSet(SampleCache(DataFolder(data).samples(split)), side)
    logits = []
    loader = evaluation_loader(whole, BATCH, workers=0)
    evaluate(model, normalize, backend, loader, full, look=lambda first, rows: logits.extend(rows))
    images, masks = zip(*(whole[i] for i in range(len(whole))))
    return torch.stack(images), torch.stack(masks) != 0, torch.stack(logits)


images, masks, logits = maps_of("test")
print(len(images), "images,", int(masks.sum()), "target pixels of", masks.numel())

# %% [markdown]
# ## Look first
#
# No number replaces this. Green circles are hits, orange ones missed targets, red ones false
# alarms.

# %%
from mshnet import plots

names = [sample.name for sample in DataFolder(data).samples("test")]


def show(chosen):
    return plots.examples(
        images=[images[i][0].numpy() for i in chosen],
        masks=[masks[i][0].numpy() for i in chosen],
        predictions=[(logits[i][0] > 0).numpy() for i in chosen],
        names=[names[i] for i in chosen],
    )


show(range(3))

# %% [markdown]
# ## Pixels: IoU and nIoU
#
# **IoU** adds up the pixels of all images first: those that are target in both, over those that are
# target in either. **nIoU** takes each image's own quotient, and then the mean.

# %%
found = logits > 0
both = (found & masks).sum((1, 2, 3)).double()
either = (found | masks).sum((1, 2, 3)).double()
iou = float(both.sum() / either.sum())
niou = float(torch.where(either == 0, 1.0, both / either.clamp(min=1)).mean())
print(f"IoU {100 * iou:.2f}  nIoU {100 * niou:.2f}")
assert abs(iou - answers["corrected"]["iou"]) < 1e-3, "the command counts the same pixels"
assert abs(niou - answers["corrected"]["niou"]) < 1e-3

# %% [markdown]
# **What just happened.** Two sums and a division give the command's numbers. They answer different
# questions. Take one image with a target of 100 pixels, found to the last pixel, and another with
# a target of 4, missed:

# %%
from mshnet import DetectionMetrics

truth = torch.zeros(2, 1, 32, 32)
truth[0, :, 5:15, 5:15] = 1
truth[1, :, 20:22, 20:22] = 1
answer = torch.where(truth.bool(), 5.0, -5.0)
answer[1] = -5.0

toy = DetectionMetrics(32)
toy.update(answer, truth)
result = toy.compute()
print({name: f"{100 * result[name]:.1f} %" for name in ("iou", "niou", "pd")})
assert round(result["iou"], 3) == 0.962 and result["niou"] == result["pd"] == 0.5

# %% [markdown]
# **What just happened.** IoU says 96 %: the small target hardly counts. nIoU and Pd say a half. In
# a data set of small targets, look at nIoU and Pd when you want to know about the small ones.

# %% [markdown]
# ## Targets: Pd and Fa
#
# **Pd** asks: of all targets, how many were found? A target is found if the centre of a predicted
# region lies less than 3 pixels from its own. **Fa** asks: what share of all pixels belongs to
# predicted regions that found nothing? It is quoted in 1e-6, so 20 means 1.3 pixels in an image
# of 256×256. Let a prediction of the right shape slip off its target, pixel by pixel:

# %%
rows = []
for slip in range(6):
    truth = torch.zeros(1, 1, 64, 64)
    truth[..., 30:34, 30:34] = 1
    answer = torch.where(torch.roll(truth, slip, 3).bool(), 5.0, -5.0)
    one = DetectionMetrics(64)
    one.update(answer, truth)
    rows.append(one.compute())
    values = f"IoU {rows[-1]['iou']:.2f}  Pd {rows[-1]['pd']:.0f}  Fa {1e6 * rows[-1]['fa']:.0f}e-6"
    print(f"off by {slip}: {values}")
assert [row["pd"] for row in rows] == [1, 1, 1, 0, 0, 0]

# %% [markdown]
# **What just happened.** At 2 pixels off IoU has fallen to a third, and Pd is still 1. At 3 Pd falls
# to 0 at once, and what was a hit is now a false alarm. Pd and Fa are about regions, and do not
# mind a ragged edge; IoU is about pixels, and does.

# %% [markdown]
# ## Three definitions
#
# The code that published numbers come from, and we, agree on everything but this:
#
# | definition | what it does |
# |---|---|
# | `corrected` | a region is a false alarm if it was matched to no target |
# | `official` | a region is *not* a false alarm if it has the same **area** as a region of its image that was matched |
# | the official training log | Pd is divided by all targets counted since training began |
#
# The second is an accident of the code, and it hides false alarms. Two regions of 9 pixels, one on
# the target and one far from it:

# %%
truth = torch.zeros(1, 1, 64, 64)
truth[..., 10:13, 10:13] = 1
claimed = truth.clone()
claimed[..., 40:43, 40:43] = 1

alarms = {}
for definition in ("corrected", "official"):
    one = DetectionMetrics(64, definition)
    one.update(torch.where(claimed.bool(), 5.0, -5.0), truth)
    alarms[definition] = round(one.compute()["fa"] * 64 * 64)
print("pixels of false alarm:", alarms)
assert alarms == {"corrected": 9, "official": 0}

# %% [markdown]
# The third needs no picture. A detector that finds all of 40 targets in every epoch, in that log:

# %%
for epoch in range(1, 5):
    print(f"epoch {epoch}: Pd {40 / (40 * epoch):.2f}")

# %% [markdown]
# **What just happened.** Pd seems to fall from epoch to epoch, while the detector is perfect. Only
# the first epoch's number is right. A table made by one evaluation afterwards is not affected.
#
# Beside definitions there are **conditions**, and they move numbers more. Each result of this
# project says its own in brackets:
#
# * *The size.* At 512×512 a target has four times the pixels that it has at 256×256, and "3 pixels
#   off" is half as far. Fa is a share of the resized map.
# * *The colour.* One grey channel, or three.
# * *Which epoch.* "The best by IoU on test" is chosen on what is then reported. The last epoch is
#   not, and is lower.
# * *What is target.* A mask that was resized or saved as JPEG has greys. We cut at the half; the
#   official code keeps the exact maximum only.

# %% [markdown]
# ## The threshold
#
# A logit above 0 is a probability above one half. That is a convention, not a law of nature. A
# threshold t on the logits is the same as taking t from all of them:

# %%
import matplotlib.pyplot as plt
import numpy as np


def sweep(logits, masks, thresholds):
    """IoU, Pd and Fa at each threshold."""
    rows = []
    for threshold in thresholds:
        metrics = DetectionMetrics(side)
        metrics.update(logits - threshold, masks)
        rows.append(metrics.compute())
    return {name: np.array([row[name] for row in rows]) for name in ("iou", "pd", "fa")}


low, high = (float(torch.quantile(logits[masks], q)) for q in (0.05, 0.95))
thresholds = np.linspace(min(low, -1), max(high, 1), 25)
_, train_masks, train_logits = maps_of("train")
train = sweep(train_logits, train_masks, thresholds)
test = sweep(logits, masks, thresholds)

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
for name, curve, style in (("train", train, "--"), ("test", test, "-")):
    left.plot(thresholds, 100 * curve["pd"], style, color="#35c759", label=f"Pd, {name}")
    left.plot(thresholds, 100 * curve["iou"], style, color="#0a84ff", label=f"IoU, {name}")
    right.plot(1e6 * curve["fa"], 100 * curve["pd"], style, color="#444", label=name)
left.set(xlabel="threshold on the logit", title="%", ylim=(0, 103))
right.set(xlabel="Fa, 1e-6 of pixels", ylabel="Pd, %", title="what a false alarm buys")
right.set_xscale("symlog", linthresh=10)
left.axvline(0, color="#999", linestyle=":")
for axis in (left, right):
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **What just happened.** A higher threshold gives up faint targets and gets rid of false alarms. The
# right picture is what an operator asks for: so many false alarms are allowed, how many targets
# does that buy? Choose on the **training** split, or on one that you hold back, and report what the
# choice gives on test. Chosen on test it would be the best of 25 draws.

# %%
BUDGET = 2 / side**2  # of all pixels may be false alarms: two in an image

allowed = np.flatnonzero(train["fa"] <= BUDGET)
chosen = int(allowed[train["pd"][allowed].argmax()]) if len(allowed) else len(thresholds) - 1
print(f"threshold {thresholds[chosen]:.2f}, chosen on train:")
for name, curve in (("train", train), ("test", test)):
    pd, fa = 100 * curve["pd"][chosen], 1e6 * curve["fa"][chosen]
    print(f"  {name:5}  Pd {pd:5.1f} %  Fa {fa:6.1f}e-6")

# %% [markdown]
# ## ROC, and why it says little here
#
# Papers also print an ROC curve: of the target pixels and of the background pixels, the shares that
# pass a threshold on the probability.

# %%
roc = answers["corrected"]["roc"]
background = 1 - masks.float().mean().item()
figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
axis.plot(roc["fpr"], roc["tpr"], "o-", color="#444", markersize=4)
axis.set(xlabel="share of background pixels", ylabel="share of target pixels", ylim=(0, 1.03))
axis.set_title(f"{100 * background:.2f} % of all pixels are background", fontsize=10)
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# **What just happened.** Nearly all pixels are background, and nearly all of them are easy. A share
# of 0.01 of the background is more area than all targets together. So a curve that hugs the corner
# may stand for a detector that nobody would use. Pd against Fa, above, has the same two
# ideas and counts regions.

# %% [markdown]
# ## A gallery of failures
#
# Of each image: how many targets were missed, and how many pixels were false alarms?

# %%
faults = []
for i in range(len(logits)):
    one = DetectionMetrics(side)
    one.update(logits[i : i + 1], masks[i : i + 1])
    faults.append((one.targets - one.matched, one.false_area["corrected"], i))
worst = [i for *_, i in sorted(faults, reverse=True)[:3]]
for missed, area, i in sorted(faults, reverse=True)[:3]:
    print(f"{names[i]}: {missed} missed, {area} pixels of false alarm")
show(worst)

# %% [markdown]
# **What just happened.** These rows tell what to do next, and no table does. Are the misses faint,
# or at the border, or do two targets melt into one region? Are the alarms all of a kind, such as
# edges of clouds, or lamps? If you change one thing, look at the same images again.
#
# For images without masks, `mshnet predict` writes overlays and a table of detections:

# %%
from pathlib import Path

files = [str(sample.image) for sample in DataFolder(data).samples("test")[:3]]
found = api.predict_files({"weight_path": weights, "device": DEVICE}, files, Path("found-08"))
for row in found[:5]:
    print(row)

# %% [markdown]
# ## The official weights
#
# The authors of MSHNet publish weights in [their repository](https://github.com/Lliu666/MSHNet), and
# two rows of numbers for IRSTD-1k there: IoU 67.16, Pd 93.88, Fa 15.03e-6, and for later weights
# 67.87, 92.86, 8.88e-6. The files load as they are, because the names of the parameters are the
# same. They were trained on colour images at 256×256, so say so:
#
# ```
# mshnet test --weight-path MSHNet_weight.tar --dataset-dir IRSTD-1k --channels 3
# ```
#
# Compare the `official` line with theirs, and the `corrected` one with what you train.

# %% [markdown]
# ## Exercise
#
# A detector answers "target" at **every** pixel of every image. Its pixel accuracy (found target
# pixels over all target pixels) is 100 %. **What are its IoU, Pd and Fa on this test split?** Write
# down three guesses between 0 and 1; right to 0.1 is right.

# %% tags=["exercise"]
iou = ...
pd = ...
fa = ...

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("More pixels do not buy Pd.") as expect:
    expect.answered(iou=iou, pd=pd, fa=fa)
    everything = DetectionMetrics(side)
    everything.update(torch.ones_like(logits), masks)
    right = everything.compute()
    expect(abs(iou - right["iou"]) < 0.1, f"IoU: how many of all pixels are targets? Not {iou}")
    expect(
        abs(pd - right["pd"]) < 0.1, f"Pd: all pixels are one region. Where is its centre? Not {pd}"
    )
    expect(abs(fa - right["fa"]) < 0.1, f"Fa: the area of regions that found nothing. Not {fa}")

# %% tags=["solution"]
# @title Solution (open after trying)
everything = DetectionMetrics(side)
everything.update(torch.ones_like(logits), masks)
result = everything.compute()
print({name: round(result[name], 4) for name in ("pixel_accuracy", "iou", "pd", "fa")})
assert result["pixel_accuracy"] == 1
assert abs(result["iou"] - masks.float().mean().item()) < 1e-6
iou, pd, fa = (result[name] for name in ("iou", "pd", "fa"))

# %% [markdown] tags=["solution"]
# IoU is the targets' share of all pixels, next to nothing. All pixels are one region, whose centre
# is the centre of the image: it finds only a target that happens to be there. So Pd is about 0, and
# Fa, the area of regions that found nothing, about 1. "More pixels" does not buy Pd.

# %% [markdown]
# ## Recap
#
# * IoU adds up pixels over the data set, nIoU goes image by image; Pd counts targets whose centre
#   was met within 3 pixels, Fa the area of regions that met none.
# * Official and corrected Fa differ by regions of equal area; size, colour, epoch and masks move
#   numbers more. A result without its conditions is half a result.
# * A threshold is chosen on training data, for a budget of false alarms, and reported on test.
# * Sort images by what went wrong, and look at them.
#
# **Next:** lesson 09, compile for a TPU you do not have.
