# %% [markdown]
# # 03 · Data on Drive
#
# **Bring a data set from Google Drive to the machine once, prove that it is whole, and look at what
# training will see.**
#
# {{badges}}
#
# {{time: 12 min on v5e-1}}
#
# **You will be able to**
#
# * mount Drive and copy a data set to the local disk, so that a second run copies nothing;
# * check a data set before training, and read what the check says about a broken one;
# * look at samples, augmented samples, and the bytes they cost on the way to a device.
#
# **You need** lesson 01. No TPU is used here. A data set of your own is welcome and not required.

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
DATASET = None  # your own set: the name of its folder (or NAME.zip) in Drive, such as "IRSTD-1k"
SIZE = 256  # side of training images, pixels

# %% [markdown]
# ## Which data
#
# | data set | images | licence of the data |
# |---|---|---|
# | IRSTD-1k | 1,001 real, 512×512 | MIT |
# | NUDT-SIRST | 1,327 synthesised, 256×256 | not stated by its authors |
# | SIRST v1 ("NUAA-SIRST") | 427 real, 96 to 456 px | not stated by its authors |
# | built-in scenes | as many as you ask | this project's |
#
# [datasets/README.md]({{repository}}/blob/main/datasets/README.md) says where each one comes from,
# which split others use, and what is odd about it. "Not stated" means that nobody has granted a
# right to pass the images on: keep them in your own Drive, out of public notebooks. All have this
# layout:
#
# ```
# IRSTD-1k/
#   images/NAME.png     .png, .bmp or .jpg; grey or colour
#   masks/NAME.png      white where the target is
#   trainval.txt        one name a line
#   test.txt
# ```
#
# Without a data set this lesson draws its own scenes, in the same layout.

# %% [markdown]
# ## Mount Drive
#
# In Colab the machine is emptied when the session ends; Drive is what stays. Mounting opens a
# window that asks for your consent. On Kaggle, attach the set with **Add Input** instead; it then
# lies under `/kaggle/input`: set `DATASET = "/kaggle/input/NAME"` above. Elsewhere a local folder stands in for Drive.

# %%
from course import clicks

clicks(
    (
        "Permit this notebook to access Drive?",
        ["No thanks", "Connect to Google Drive"],
        "Connect to Google Drive",
    ),
    ("Choose an account", ["your account", "another account"], "your account"),
    ("Colab asks for access", ["Cancel", "Continue"], "Continue"),
)

# %%
import os
from pathlib import Path


def in_colab():
    """Whether Drive can be mounted here."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:  # Kaggle may hold Colab's packages, but no Drive
        return False
    try:
        return importlib.util.find_spec("google.colab") is not None
    except ModuleNotFoundError:  # not even the package `google` is there
        return False


if in_colab():
    from google.colab import drive

    drive.mount("/content/drive")
    DRIVE, LOCAL = Path("/content/drive/MyDrive"), Path("/content/data")
else:
    print("No Colab here: the folder drive/ stands in for Google Drive.")
    DRIVE, LOCAL = Path("drive"), Path("local-data")
DRIVE.mkdir(exist_ok=True)
LOCAL.mkdir(exist_ok=True)
print("kept:", DRIVE, "· emptied with the session:", LOCAL)

# %%
from mshnet.data.scenes import write_scenes

if DATASET is None:
    NAME = "mshnet-scenes"
    write_scenes(DRIVE / NAME, train=40, test=10, size=SIZE)
else:
    NAME = DATASET
print("data set:", DRIVE / NAME)

# %% [markdown]
# ## Copy once
#
# Drive is a network service that looks like a folder. Each file opened is a request over the
# network, and training opens each image and each mask again in every epoch. For the paper's
# 400 epochs on IRSTD-1k:

# %%
EPOCHS, TRAIN_IMAGES = 400, 800  # the paper's epochs, the size of IRSTD-1k's training split

print(f"reading from Drive while training: {EPOCHS * TRAIN_IMAGES * 2:,} files opened")
print(f"copied to the local disk first:    {TRAIN_IMAGES * 2:,} files opened")

# %% [markdown]
# So the first thing a session does is to copy. `stage` takes the data set's folder, or one archive
# of it (.zip, .tar, .tar.gz), and returns a folder on the local disk with what training reads:
# `images/`, `masks/` and the lists. It copies sixteen files at a time, because a request to Drive
# is mostly waiting. One archive is better still: one file to open over the network, not a thousand.

# %%
import time

from mshnet.data.stage import stage

source = DRIVE / NAME
if not source.exists():
    source = DRIVE / f"{NAME}.zip"


def files_of(folder, fact="st_size"):
    """Size of each file, or another fact about it, by its path below the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): getattr(path.stat(), fact) for path in files}


before = files_of(LOCAL, "st_mtime_ns")  # when each was written
for call in ("first", "second"):
    start = time.perf_counter()
    data = stage(source, LOCAL)  # the local folder
    took = time.perf_counter() - start
    after = files_of(LOCAL, "st_mtime_ns")
    print(f"{call} call: {len(after.items() - before.items()):4} files written, {took:6.3f} s")
    before = after

# %% [markdown]
# **What just happened.** The second call wrote nothing, so this cell may stand at the top of every
# session. (If the first one wrote nothing either, you have run the cell before.) One of the files
# is `.staged.json`, the record of what the copy was made from. As long as Drive still says the
# same, nothing is copied; after a change on Drive, only what changed. A copy that was interrupted
# goes on where it stopped: a file gets its name when it is whole, not before.
#
# On the command line the same is `--stage`:
#
# ```
# mshnet train --dataset-dir /content/drive/MyDrive/IRSTD-1k.zip --stage --use-tpu
# ```
#
# Always verify the copy. `stage` compares the size of each file, and the checksums
# of a zip. See for yourself, names and sizes on both sides:

# %%
here = files_of(data)
del here[".staged.json"]
print(f"{len(here)} files, {sum(here.values()) / 1e6:.1f} MB in {data}")
if source.is_dir():
    there = files_of(source)
    assert here.items() <= there.items(), "the copy differs from Drive: run the cell above again"
    print("the same names and sizes as on Drive")
    left = sorted(there.keys() - here.keys())
    print("left on Drive, because training does not read it:", len(left), left[:3])

# %% [markdown]
# For a set of your own make the archive, once, on the machine that has it:
# `zip -rq IRSTD-1k.zip IRSTD-1k`. Upload the one file to Drive, and `DATASET = "IRSTD-1k"` finds
# it. The same with the scenes, to see that an archive gives the same files, and that one whose
# upload stopped halfway is refused and leaves nothing behind:

# %%
import shutil

from mshnet import RequestError

if DATASET is None:
    archive = Path(shutil.make_archive(DRIVE / NAME, "zip", root_dir=DRIVE, base_dir=NAME))
    unpacked = files_of(stage(archive, LOCAL / "from-archive"))
    assert here.items() <= unpacked.items()
    print(f"{archive.name}: one file of {archive.stat().st_size / 1e6:.1f} MB, the same files\n")

    half = DRIVE / "half.zip"
    half.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    try:
        stage(half, LOCAL)
    except RequestError as error:
        print("refused:", error)
    else:
        raise AssertionError("half an archive was accepted")
    assert not (LOCAL / "half").exists()

# %% [markdown]
# ## Decode once
#
# The local disk is not the end of it. A PNG has to be decoded, and the package decodes each file
# once, before training, and keeps the pixels (`--cache ram`, the default; `disk` for a set that is
# larger than the memory). What one epoch costs either way:

# %%
from mshnet.data.layout import DataFolder
from mshnet.data.sample_cache import SampleCache

samples = DataFolder(data).samples("train")
stores = {
    "files, one by one": SampleCache(samples, cache="none"),
    "decoded cache": SampleCache(samples, cache="ram"),
}
on_disk = sum(path.stat().st_size for s in samples for path in (s.image, s.mask))
opened = {"files, one by one": 2 * len(samples), "decoded cache": 0}

print(f"an epoch of {len(samples)} samples:")
for name, store in stores.items():
    start = time.perf_counter()
    pixels = sum(
        image.nbytes + mask.nbytes for image, mask in (store[i] for i in range(len(store)))
    )
    took = time.perf_counter() - start
    print(f"{name:<18} {opened[name]:>4} files opened, {1000 * took:8.2f} ms")
print(f"{on_disk / 1e6:.2f} MB as files, {pixels / 1e6:.2f} MB decoded")

# %% [markdown]
# **What just happened.** The same pixels, without opening a file. The times are those of a local
# disk that has just been read; a Drive that answers each request over the network is not in them.
# The price is memory: the decoded bytes in the last line. The real sets are small enough. IRSTD-1k
# is 1,001 images of 512×512, one byte a pixel and one for the mask: half a gigabyte.

# %% [markdown]
# ## Check
#
# `mshnet check-data` reads everything once and reports. As a function:

# %%
from mshnet.data.check import check, table

report = check(data)
print(table(report))
assert not report.errors(), "fix the data set first"

# %% [markdown]
# Compare the counts with those in datasets/README.md before the first run: the wrong split gives
# numbers that nobody can compare. The same as a command, for scripts. Its exit code is 0 when
# training would start and 2 when it would not, and `--json` prints the whole report for a program:

# %%
import json


def check_data(*arguments):
    """Run the command as a shell would."""
    command = [sys.executable, "-m", "mshnet", "check-data", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


done = check_data(data, "--json")
counted = {name: split["images"] for name, split in json.loads(done.stdout)["splits"].items()}
print("exit code", done.returncode, counted)
assert done.returncode == 0

# %% [markdown]
# ## Break it
#
# What does the check say about a set that is not whole? We damage a copy in five ways that occur in
# real life: an upload that stopped in the middle of an image, a mask that was lost, a mask that is
# not black and white (85 of IRSTD-1k's are not), a name that is in both lists, and a training
# picture that is in the test list under another name.

# %%
import numpy as np
from PIL import Image

broken = LOCAL / "broken"
shutil.rmtree(broken, ignore_errors=True)
shutil.copytree(data, broken)
folder = DataFolder(broken)
truncated, maskless, grey, shared, twin = folder.samples("train")[:5]

whole = truncated.image.read_bytes()
truncated.image.write_bytes(whole[: len(whole) // 2])
maskless.mask.unlink()
mask = np.asarray(Image.open(grey.mask).convert("L"))
Image.fromarray(np.where(mask > 127, 253, 7).astype(np.uint8)).save(grey.mask)
with folder.list_file("test").open("a") as names:
    names.write(f"\n{shared.name}\ncopied\n")
shutil.copy2(twin.image, broken / "images" / f"copied{twin.image.suffix}")
shutil.copy2(twin.mask, broken / "masks" / f"copied{twin.mask.suffix}")

damaged = check(broken)
print(table(damaged))
assert len(damaged.errors()) == 2, damaged.errors()
assert grey.name in damaged.splits["train"].touched
assert shared.name in damaged.shared_names
assert f"{twin.name} = copied" in damaged.shared_content

# %% [markdown]
# **What just happened.** Two findings are errors, and name their file. The other three are warnings:
# training would start.
#
# * A mask that is not binary is cut at half of its maximum, and named. (Code that casts masks to
#   integers turns 253/255 into 0, and the whole mask into background.)
# * A picture in both lists makes the test too easy. Names are compared, and contents too.
#
# Training does not start on a broken set. It looks for every file and decodes it first, so it stops
# at once instead of in the middle of the night:

# %%
try:
    SampleCache(DataFolder(broken).samples("train"))
except RequestError as error:
    print("refused:", error)
else:
    raise AssertionError("a broken set was accepted")
print("exit code of check-data:", check_data(broken).returncode)

# %% [markdown]
# ## Look at it
#
# Statistics are not enough: look at the images. The first six samples, with the outline of the mask in red:

# %%
import matplotlib.pyplot as plt

from mshnet import plots

store = stores["decoded cache"]


def show(pictures, titles):
    """Pictures side by side, three in a row."""
    rows = -(-len(pictures) // 3)
    _, axes = plt.subplots(rows, 3, figsize=(10, 3.5 * rows), layout="constrained", squeeze=False)
    for axis, picture, title in zip(axes.flat, pictures, titles):
        axis.imshow(picture)
        axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.axis("off")
    plt.show()


def outlined(image, mask):
    """A grey image with the outline of its mask."""
    return plots.overlay(np.stack([image] * 3, axis=-1), mask != 0)


show(
    [outlined(*store[i]) for i in range(6)],
    [f"{store.samples[i].name}: {int(store[i][1].sum())} px of target" for i in range(6)],
)

# %% [markdown]
# **What just happened.** The targets are a few pixels each, and bright clouds, walls and glints are
# not targets. If an outline sits beside its target in your own set, image and mask do not belong
# together, and no training can fix that.
#
# ## What training sees
#
# Training never sees the images like this. Each time it flips, scales to between half and twice the
# size, crops and blurs, at random. One image, in six epochs:

# %%
from mshnet.data.loader import TrainingSet

training = TrainingSet(store, base_size=SIZE, crop_size=SIZE, seed=0)
views = [training[epoch, 0] for epoch in range(6)]
show(
    [outlined(image[0].numpy(), mask[0].numpy()) for image, mask in views],
    [f"epoch {epoch}: {int(mask.sum())} px of target" for epoch, (_, mask) in enumerate(views)],
)

# %% [markdown]
# **What just happened.** A sample is addressed by epoch and index, and its randomness comes from
# (seed, epoch, index) alone. So the same address gives the same picture, in any worker and after a
# restart. A crop of an enlarged image can miss every target; black is where a shrunken one ended.
# How often is a crop empty?

# %%
again = training[3, 0]
assert (again[0] == views[3][0]).all() and (again[1] == views[3][1]).all()

crops = [training[epoch, index][1] for epoch in range(5) for index in range(len(store))]
empty = sum(not mask.any() for mask in crops)
print(f"{empty} of {len(crops)} crops hold no target ({100 * empty / len(crops):.0f} %)")

# %% [markdown]
# These crops are useful: they are where false alarms can be punished, if the loss has a gradient
# there. A plain IoU has none, because its numerator is 0 whatever the network says. The package's
# loss has a case for crops without target. The gradient of both in the warm-up phase, for a network
# that sees one target where there is none:

# %%
import torch

from mshnet import SLSIoULoss

nothing = torch.zeros(1, 1, SIZE, SIZE)
for name, loss in (("official", SLSIoULoss(official=True)), ("package", SLSIoULoss())):
    logits = torch.full((1, 1, SIZE, SIZE), -10.0)  # sure of the background
    logits[..., :5, :5] = 2.0  # and of a false alarm of 25 pixels
    logits.requires_grad_()
    loss(logits, nothing, warm_epoch=5, epoch=0).backward()
    print(f"{name:<9}length of the gradient: {logits.grad.norm().item():.1e}")

# %% [markdown]
# ## Bytes on the way
#
# A TPU that waits for its host is wasted, so each byte on the way counts. Usual loaders send
# float32 RGB. An infrared frame has one channel of 8 bits:

# %%
image, mask = views[0]
as_float_rgb = image.float().expand(3, -1, -1).contiguous()

print("sent by the package:", tuple(image.shape), image.dtype, f"{image.nbytes / 1024:5.0f} KiB")
print("float32 RGB:        ", tuple(as_float_rgb.shape), as_float_rgb.dtype, end=" ")
print(f"{as_float_rgb.nbytes / 1024:5.0f} KiB, {as_float_rgb.nbytes // image.nbytes} times as much")
assert as_float_rgb.nbytes == 12 * image.nbytes

# %% [markdown]
# **What just happened.** Three channels of four bytes for one of one. The package sends the single
# byte and makes the network's three normalised channels on the device.

# %% [markdown]
# ## Exercise
#
# A small subset is handy for trying things out. Some collections name their lists differently:
# `img_idx/train_NAME.txt` and `img_idx/test_NAME.txt`, where NAME is the folder's name.
#
# Make a set `subset` beside your data that has **20 training images and 5 test images**, with lists
# of that form, and have `check` accept it without an error or a warning.

# %% tags=["exercise"]
subset = LOCAL / "subset"
shutil.rmtree(subset, ignore_errors=True)  # start over each time
# your code: DataFolder(data).samples("train") has the samples, with .name, .image and .mask

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("Train on it to see that things run; 5 test images give no result.") as expect:
    expect(subset.is_dir(), f"there is no folder {subset.name} yet: write your code above")
    lists = [f"img_idx/{split}_subset.txt" for split in ("train", "test")]
    missing = [name for name in ["images", "masks", *lists] if not (subset / name).exists()]
    expect(not missing, f"{subset.name} has no {' and no '.join(missing)}")
    answer = check(subset)
    counts = {name: split.images for name, split in answer.splits.items()}
    expect(counts == {"train": 20, "test": 5}, f"wanted 20 and 5 images, found {counts}")
    expect(not answer.errors(), f"check finds an error: {[str(e) for e in answer.errors()][:1]}")
    both = answer.shared_names or answer.shared_content
    expect(not both, f"the splits share images: {list(both)[:3]}")
    for split in ("train", "test"):
        whole, part = (
            {sample.name for sample in DataFolder(folder).samples(split)}
            for folder in (data, subset)
        )
        expect(part <= whole, f"{split} has images of the other split: {sorted(part - whole)[:3]}")

# %% tags=["solution"]
# @title Solution (open after trying)
shutil.rmtree(subset, ignore_errors=True)
for name in ("images", "masks", "img_idx"):
    (subset / name).mkdir(parents=True)

for split, count in (("train", 20), ("test", 5)):
    chosen = DataFolder(data).samples(split)[:count]
    for sample in chosen:
        shutil.copy2(sample.image, subset / "images")
        shutil.copy2(sample.mask, subset / "masks")
    names = "\n".join(sample.name for sample in chosen)
    (subset / "img_idx" / f"{split}_subset.txt").write_text(names + "\n")
print(table(check(subset)))

# %% [markdown] tags=["solution"]
# Train on it with `mshnet train --dataset-dir local-data/subset` (in Colab:
# `/content/data/subset`). A number from 5 test images is no result; use it to see that things run.

# %% [markdown]
# ## Recap
#
# * Drive keeps, the local disk works: copy once at the start of a session, compare names and sizes,
#   decode once into memory.
# * `mshnet check-data` finds what training would stop at, and names what would make the numbers
#   wrong: masks that are not binary, pictures in both lists.
# * An augmented sample depends on seed, epoch and index alone; it travels as 8-bit grey, a twelfth
#   of float32 RGB.
#
# **Next:** lesson 04, one core.
