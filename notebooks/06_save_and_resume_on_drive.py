# %% [markdown]
# # 06 · Save and resume on Drive
#
# **Kill a training run for real, lose its machine, damage its checkpoint, and let one command resume
# it to the end.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * save weights that open on every machine, and write them whole or not at all;
# * refuse a weight file that would run code;
# * list what a checkpoint must hold for training to resume to the same numbers;
# * begin a run and go on with it by one command, whatever ended the session before;
# * keep a copy on Drive that may fail without stopping the training.
#
# **You need** lessons 03 (Drive) and 04 (the training step). Without Drive a local folder stands in for it,
# without a TPU a narrow network on the CPU.

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
DEVICE = "tpu" if TPU else "cpu"  # without a TPU, "tpu" is XLA on the CPU: it compiles each time

SIZE = 32 if SMALL else 256  # side of the images, pixels
BATCH = 4 if SMALL else 16
SCENES = 40 if SMALL else 160
EPOCHS = 8
STEPS = SCENES // BATCH  # of an epoch

# A TPU belongs to one process at a time. Here it is the training's, so this notebook's own XLA
# works on the CPU.
os.environ["PJRT_DEVICE"] = "CPU"
print(f"training on {DEVICE}, {SIZE}×{SIZE}, {EPOCHS} epochs of {STEPS} steps")

# %% [markdown]
# Drive as in lesson 03. What an earlier pass through this lesson left is removed.

# %%
import shutil
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
    DRIVE, LOCAL = Path("/content/drive/MyDrive/mshnet-lesson-06"), Path("/content/lesson-06")
else:
    print("No Colab here: the folder drive/ stands in for Google Drive.")
    DRIVE, LOCAL = Path("drive/lesson-06"), Path("local-runs")
for folder in (DRIVE, LOCAL):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

# %%
from mshnet.data.scenes import write_scenes

data = write_scenes(LOCAL / "scenes", train=SCENES, test=8, size=SIZE)
print("data:", data, "· runs:", LOCAL, "· their copies:", DRIVE)

# %% [markdown]
# ## One command
#
# A session can end at any time (preemption): the browser was closed for too long, the hours are used up, the
# machine is needed elsewhere. The process gets no warning, and the local disk goes with it. So the
# line that begins a run should be the line that goes on with it. In Colab:
#
# ```
# !mshnet train --use-tpu --dataset-dir /content/drive/MyDrive/IRSTD-1k.zip --stage \
#     --save-dir /content/drive/MyDrive/runs/first --resume auto
# ```
#
# | flag | what it does |
# |---|---|
# | `--resume auto` | goes on from the newest whole checkpoint, and begins a run if there is none |
# | `--save-dir` on Drive | the run lives on the local disk, and is copied to Drive in the background |
# | `--backup FOLDER` | the same, explicitly, for any pair of folders |
# | `--save-minutes 10` | a checkpoint so often (this is the default), and after every epoch |
# | `--stage` | copies or unpacks the data set first, as lesson 03 does |
#
# With this line in a cell, and Drive mounted in the cell before it, these clicks take a run up again
# after the session has vanished:

# %%
from course import clicks

clicks(
    ("Colab: top right", ["Reconnect"], "Reconnect"),
    ("Runtime", ["Run all", "Run before", "Restart session"], "Run all"),
    (
        "Permit access to Drive?",
        ["No thanks", "Connect to Google Drive"],
        "Connect to Google Drive",
    ),
)

# %% [markdown]
# Drive is recognised as a network drive by its mount. A local folder that stands in for it is not, so the
# cells here name `--save-dir` and `--backup`. And they save as often as they can: a step here is
# over in no time, and we want to be hit in the middle of an epoch.

# %%
COMMAND = [sys.executable, "-m", "mshnet", "train"]
if SMALL:  # the command has no flag for the width of the network, so a script stands around it
    script = LOCAL / "narrow.py"
    script.write_text("""\
import sys
from mshnet import api, cli

NARROW = {"widths": (2, 4, 4, 8, 8), "depths": (1, 1, 1, 1, 1)}
train = api.train
api.train = lambda overrides, *args, **kwargs: train(NARROW | overrides, *args, **kwargs)
sys.exit(cli.main(["train", *sys.argv[1:]]))
""")
    COMMAND = [sys.executable, str(script)]

FLAGS = f"--device {DEVICE} --batch-size {BATCH} --base-size {SIZE} --crop-size {SIZE}".split()
FLAGS += f"--epochs {EPOCHS} --warm-epoch 0 --workers 0 --save-minutes 0.001".split()
ENVIRONMENT = os.environ | {"PJRT_DEVICE": "TPU" if TPU else "CPU"}
if SMALL:
    ENVIRONMENT["OMP_NUM_THREADS"] = "1"  # small tensors gain nothing from more threads


def start(name):
    """Begin a run or go on with it, in a process of its own."""
    where = ["--dataset-dir", data, "--save-dir", LOCAL / name, "--backup", DRIVE / name]
    return subprocess.Popen(
        [*COMMAND, *FLAGS, *map(str, where), "--resume", "auto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
    )


undisturbed = start("undisturbed")
print("process", undisturbed.pid, "trains in the background")

# %% [markdown]
# Nothing will happen to this run. It is what the other one, which we shall treat badly, will be
# compared with. Meanwhile, files.

# %% [markdown]
# ## Weights that open everywhere
#
# Three ways to save a model that lives on an XLA device:

# %%
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from mshnet import MSHNet

model = MSHNet(widths=(2, 4, 4, 8, 8), depths=(1, 1, 1, 1, 1)).to(torch_xla.device())
state = model.state_dict()

torch.save({"state_dict": state}, LOCAL / "as_it_is.pkl")
torch.save({"state_dict": {k: v.cpu() for k, v in state.items()}}, LOCAL / "by_hand.pkl")
xm.save({"state_dict": state}, LOCAL / "by_xm.pkl")

# %% [markdown]
# And a machine that has no torch_xla opens them, as the official code's test mode would: with
# `torch.load(path)` and no `map_location`
# ([main.py](https://github.com/Lliu666/MSHNet/blob/main/main.py)).

# %%
ELSEWHERE = """
import sys
sys.modules["torch_xla"] = None  # as if it were not installed
import torch
for path in sys.argv[1:]:
    try:
        state = torch.load(path, weights_only=True)["state_dict"]
        print(path, "opens,", len(state), "tensors on", {v.device.type for v in state.values()})
    except NotImplementedError as error:
        print(path, "does not open:", str(error).split(". ")[0])
"""
files = [str(LOCAL / f"{name}.pkl") for name in ("as_it_is", "by_hand", "by_xm")]
done = subprocess.run(
    [sys.executable, "-c", ELSEWHERE, *files], capture_output=True, text=True, check=True
)
print(done.stdout, end="")
assert [" opens, " in line for line in done.stdout.splitlines()] == [False, True, True]

# %% [markdown]
# **What just happened.** A tensor is saved with the name of its device. Where there is no such
# device, the file opens only for those who know that they have to say `map_location="cpu"`. Moved
# to the host first, it opens for all.
#
# `xm.save` does that move, and hides two things:
#
# * It computes what is still pending before it copies. With replicas (lesson 05) that may hold a
#   sum over all of them, so **every replica has to call `xm.save`**; it lets only the first one
#   write. Under `if xm.is_master_ordinal():` one replica calls it alone: a deadlock.
# * It writes straight to the path it is given.
#
# The second one is the next section. The package moves the tensors itself, on all replicas, and
# then lets one of them write.

# %% [markdown]
# ## Whole or not at all
#
# A file is written over some time, and a session may end within it. What is left when the writing
# of new weights fails half way, over a good file?

# %%
from mshnet import RequestError
from mshnet.training import checkpoint


class TheEnd:
    """Where the disk is full, or the session over."""

    def __reduce__(self):
        raise OSError("No space left on device")


def save(content, path):
    """Under a temporary name first, then renamed."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # really on the disk, not on its way
    os.replace(part, path)  # one operation: a reader finds the old file or the new one


good = {name: tensor.cpu() for name, tensor in state.items()}
for name, write in (("torch.save", torch.save), ("our save", save)):
    path = LOCAL / "precious.pkl"
    torch.save(good, path)
    try:
        write(good | {"one more": TheEnd()}, path)
    except OSError as error:
        print(f"{name}: {error}")
    try:
        print("   the good file is there,", len(checkpoint.load(path)), "tensors")
    except RequestError as error:
        print("   the good file is lost:", error)
assert len(checkpoint.load(path)) == len(good)

# %% [markdown]
# **What just happened.** `torch.save` empties the file before it fills it. With a temporary name
# the old file stays until the new one is complete. `checkpoint.save` in
# `mshnet/training/checkpoint.py` is this function, and it removes what a failed attempt left.

# %% [markdown]
# ## A file that runs code
#
# A `.pkl` is not data but a program that makes data. This one makes a file as soon as it is opened;
# one from a stranger may do worse:

# %%
from mshnet import cli

proof = LOCAL / "this-was-run"


class Foreign:
    def __reduce__(self):
        return Path.touch, (proof,)


foreign = LOCAL / "foreign.pkl"
torch.save({"state_dict": Foreign()}, foreign)

torch.load(foreign, weights_only=False)
print("weights_only=False: code was run:", proof.exists())
assert proof.exists()
proof.unlink()

code = cli.main(["test", "--weight-path", str(foreign)])
print("exit code", code, "· code was run:", proof.exists())
assert code == 2 and not proof.exists()

# %% [markdown]
# **What just happened.** `weights_only=True` allows tensors and plain values, and nothing that could
# be called. It has been the default of `torch.load` since PyTorch 2.6
# ([release notes](https://pytorch.org/blog/pytorch2-6/)). The package opens every file so, and says
# in one line what to do. Its own checkpoints hold nothing else, config included.

# %% [markdown]
# ## The run that nothing happened to

# %%
output, _ = undisturbed.communicate()
print(output, end="")
assert undisturbed.returncode == 0

# %% [markdown]
# ## Kill it
#
# Now the other run, with the same command. We wait until it is some way into its second epoch and
# send SIGKILL, at a moment that nobody has chosen: in a step, in a test, in the middle of a write.
# A process cannot catch it and does nothing more. It is the closest test of a machine that
# is taken away.

# %%
import random
import signal
import time

ended = []  # how each session ended, and the steps that its newest checkpoint has behind it


def steps_saved(folder):
    """Steps behind the newest whole checkpoint in a folder."""
    try:
        _, content, _ = checkpoint.newest([folder])
    except RequestError:  # it is being replaced at this moment
        return 0
    epochs, steps = checkpoint.position(content)
    return epochs * STEPS + steps


def session(how, more):
    """A session of the run `first` that a signal ends, when about so many more steps are saved."""
    begin = max(steps_saved(LOCAL / "first"), steps_saved(DRIVE / "first"))
    process = start("first")
    while process.poll() is None and steps_saved(LOCAL / "first") < begin + more:
        time.sleep(0.05)
    time.sleep(random.uniform(0, 0.1))
    process.send_signal(how)
    output, _ = process.communicate()
    print(output + f"exit code: {process.returncode}")
    ended.append((how.name, steps_saved(LOCAL / "first")))
    return process.returncode, output


code, output = session(signal.SIGKILL, more=STEPS + 2)
assert code == -signal.SIGKILL

# %% [markdown]
# ## What it left
#
# The newest checkpoint, part by part:

# %%
found, content, damaged = checkpoint.newest([LOCAL / "first"])


def size_of(part):
    """Bytes of the tensors in a part."""
    if isinstance(part, torch.Tensor):
        return part.nbytes
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return sum(map(size_of, parts))


MEANING = {
    "net": "weights, and batch norm's statistics",
    "optimizer": "Adagrad's sum of squared gradients, of the shape of every weight",
    "rng": "random states of the host and the device",
    "epoch": "the last one that is finished, from 0",
    "step": "steps done in the next one",
    "loss_sum": "of these steps, for the mean that is logged",
    "seconds": "spent on these steps",
    "best": "the best epoch's line of metrics.jsonl",
    "config": "every setting",
    "full": "whether the warm-up is over, and all heads train",
    "replica_state": "each replica's batch norm, where there are several",
}
print(found, f"{found.stat().st_size / 1024:.0f} KiB")
for name, part in content.items():
    value = str(part) if isinstance(part, int) else ""
    print(f"{name:<14}{size_of(part) or '':>9} {value:>4}  {MEANING.get(name, '')}")

# %% [markdown]
# The optimizer counts the steps of each weight as well, so it can be asked whether the position is
# right. (The warm-up, here the first epoch, trains one head only; the others begin after it.)

# %%
counted = {int(state["step"]) for state in content["optimizer"]["state"].values()}
epochs, steps = checkpoint.position(content)
total = epochs * STEPS + steps
print(
    f"{epochs} epochs of {STEPS} steps, and {steps}: {total}; counted by the optimizer: {counted}"
)
assert counted == {total, total - STEPS} and damaged == []

# %% [markdown]
# **What just happened.** Weights are hardly half of it (and of a network this narrow, most of the
# file is the names of hundreds of tiny tensors). Training that goes on from weights alone begins
# with empty sums, and Adagrad then takes large steps again.
#
# What is *not* there: the order of the samples, the loader's workers, the augmentation. A sample is
# addressed by epoch and index, and its randomness comes from (seed, epoch, index) alone (lesson
# 03). So the position is all it takes to go on with the very next batch.

# %% [markdown]
# ## Go on, and kill it again
#
# The same command:

# %%
code, output = session(signal.SIGKILL, more=STEPS - 3)
assert code == -signal.SIGKILL and "resuming" in output

# %% [markdown]
# ## The machine is gone
#
# A new session has an empty disk. Only Drive is left, and it may be a few steps behind, because the
# copy is made while training goes on.
#
# This session ends by SIGTERM, which is how a machine asks a process to leave. Ctrl-C is SIGINT,
# and has the same effect on a training run; so has the stop button beside a `!` command in Colab
# ([its code](https://github.com/googlecolab/colabtools/blob/main/google/colab/_system_commands.py)).

# %%
print("steps saved on the local disk:", steps_saved(LOCAL / "first"))
print("steps saved on Drive:         ", steps_saved(DRIVE / "first"))
shutil.rmtree(LOCAL / "first")

code, output = session(signal.SIGTERM, more=4)
assert f"from {DRIVE / 'first'}" in output
assert code == 143 and "stopped by SIGTERM" in output

# %% [markdown]
# **What just happened.** It went on from Drive, and says so: the run was copied back first. On the
# signal it finished the step or the test that it was in, saved, waited for the copy, and left with
# the exit code that shells use for it: 143, or 130 after Ctrl-C. A second signal ends the training
# at once, without saving.

# %% [markdown]
# ## The newest checkpoint is damaged
#
# A disk with bad blocks, a file that a sync program cut off: the newest checkpoint exists, and is
# worth nothing. What will be taken instead?

# %%
BOTH = [LOCAL / "first", DRIVE / "first"]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def choose():
    found, content, damaged = checkpoint.newest(BOTH)
    epochs, steps = checkpoint.position(content)
    print(f"{len(damaged)} damaged, takes {found}: epoch {epochs} and {steps} steps")
    return found, epochs * STEPS + steps


whole = choose()
truncate(BOTH[0] / checkpoint.CHECKPOINT)
copy = choose()
truncate(BOTH[1] / checkpoint.CHECKPOINT)
before = choose()
assert copy == (BOTH[1] / checkpoint.CHECKPOINT, whole[1])
assert before[0].name == checkpoint.PREVIOUS and before[1] < whole[1]

# %% [markdown]
# Both copies of the newest are damaged now. The same command again, and nothing more shall happen:

# %%
last = start("first")
output, _ = last.communicate()
print(output, end="")
assert last.returncode == 0 and output.count("passed over") == 2
ended[-1] = ("SIGTERM, damage", before[1])

# %% [markdown]
# **What just happened.** The file has checksums, so a damaged one is recognised, named and passed
# over. In both folders the checkpoint before the newest is kept, and it takes a few steps to be
# where the run was.

# %% [markdown]
# ## To the last bit
#
# One run was left alone. The other was killed twice, lost its disk, was asked to leave, and went on
# from the last but one checkpoint. `metrics.jsonl` has the mean loss of each epoch and a hash of all
# weights after it:

# %%
from mshnet.training.run_dir import read_log

left_alone, treated_badly = read_log(LOCAL / "undisturbed"), read_log(LOCAL / "first")
print(f"{'epoch':<7}{'loss, left alone':<22}{'loss, treated badly':<22}weights")
for one, other in zip(left_alone, treated_badly):
    same = "the same" if one["weights"] == other["weights"] else "DIFFERENT"
    print(f"{one['epoch'] + 1:<7}{one['loss']!r:<22}{other['loss']!r:<22}{other['weights']} {same}")


def numbers(records):
    return [[r[name] for name in ("epoch", "loss", "iou", "pd", "fa", "weights")] for r in records]


assert len(treated_badly) == EPOCHS
if not TPU:
    assert numbers(left_alone) == numbers(treated_badly)

# %%
import matplotlib.pyplot as plt

_, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for records, style, label in (
    (left_alone, {"color": "#0a84ff", "linewidth": 6, "alpha": 0.4}, "left alone"),
    (treated_badly, {"color": "#444", "marker": ".", "linewidth": 1}, "treated badly"),
):
    axis.plot([r["epoch"] + 1 for r in records], [r["loss"] for r in records], label=label, **style)
top = 1.4 * axis.get_ylim()[1]
for how, steps in ended:
    axis.axvline(steps / STEPS, color="#ff453a", linestyle=":")
    axis.text(steps / STEPS, top, f"{how} ", rotation=90, ha="right", va="top", fontsize=8)
axis.set_ylim(top=top)
axis.set(xlabel="epoch", ylabel="training loss", xticks=range(EPOCHS + 1))
axis.legend(loc="lower right")
plt.show()

# %% [markdown]
# **What just happened.** Not about the same curve but the same bits, so anything forgotten in the
# checkpoint would show. (The jump after the first epoch is the end of the warm-up: from there on
# the loss is another function.)
#
# Same bits take the same kind of device and the same number of threads; other ones add in another
# order. XLA on the CPU (`DEVICE = "tpu"` in Setup, if there is none) fills the table with other
# numbers, and both columns are equal as well. This was not measured on a TPU; there the table shows
# it.

# %% [markdown]
# ## When Drive fails
#
# Drive can be full, read-only, slow, or no longer mounted. A file that stands where the folder
# should be causes the same sort of error, on every machine. This run is a function call in the
# notebook instead of a process, which makes no difference:

# %%
from mshnet import api

torch.set_num_threads(1)  # small tensors gain nothing from more
said = []


def log(text):
    said.append(text)
    print(text + "\n", end="")


(DRIVE / "second").write_text("in the way")
settings = {
    "dataset_dir": str(data),
    "batch_size": 4,
    "base_size": 32,
    "crop_size": 32,
    "warm_epoch": 0,
    "epochs": 1,
    "device": "cpu",
    "widths": (2, 4, 4, 8, 8),
    "depths": (1, 1, 1, 1, 1),
    "workers": 0,
    "save_dir": str(LOCAL / "second"),
    "backup": str(DRIVE / "second"),
}
api.train(settings, log=log)

warnings = [text for text in said if "training goes on" in text]
assert len(warnings) == 1 and said[-1].startswith("backup: not in")
assert checkpoint.is_whole(LOCAL / "second" / checkpoint.CHECKPOINT)

# %% [markdown]
# **What just happened.** One warning, and training went on. Copies are made by a thread of their
# own, so a slow Drive costs no step; the end of a run waits for it, two minutes at most. The last
# line says what did not arrive, and where it is.
#
# Drive gets the best weights and the last two checkpoints. Each file is written under a temporary
# name there too, read back, compared by size and hash, and renamed. A folder that vanished is made
# again. A Drive that was unmounted is not: its place is an ordinary folder then, on the local disk,
# which would look like a copy and be none.

# %% [markdown]
# ## In time for the end
#
# A session whose length is known should not be killed at all. `--max-minutes 540` saves and stops
# in time for nine hours. Here it is twelve seconds, of which ten are kept for saving and for the
# copy; Drive works again, and the epochs would take much longer:

# %%
(DRIVE / "second").unlink()
said.clear()
result = api.train({"epochs": 1000, "max_minutes": 0.2}, resume=str(LOCAL / "second"), log=log)

assert result["stopped"] == "--max-minutes 0.2"
assert said[-1].startswith("backup: complete")
assert steps_saved(DRIVE / "second") == steps_saved(LOCAL / "second") > 10

# %% [markdown]
# **What just happened.** It stopped by itself, said how to go on, and the copy that the last section
# missed is complete. The exit code of the command is 0 then: a limit of your own is no failure.
# Everything else came from the checkpoint, the settings and the backup's folder included.

# %% [markdown]
# ## A loop of your own
#
# All of this rests on a few lines. Tensors go to the host to be saved. On the
# way back, everything is put together on the host and then moved (`Backend.prepare`), because what an
# optimizer makes on the device in its first step costs another compilation. A scheduler or a moving
# average of the weights is one more entry. Dropout draws from the **device's** random state, which
# `torch.manual_seed` does not touch: without it the run goes on to other numbers.

# %%
from torch import nn

from mshnet.training import backend as backends

backend = backends.make_backend("tpu")  # XLA; in this notebook on the CPU
kept = LOCAL / "own-loop.pkl"


def make():
    """The network on the host, with fresh weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def make_optimizer(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for step in steps:
        sample = torch.Generator().manual_seed(step)  # which data: from the step's number alone
        loss = model(torch.rand(4, 8, generator=sample).to(backend.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    return torch.cat([p.detach().cpu().ravel() for p in model.parameters()])


def keep(model, optimizer, step):
    content = {"net": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    content |= {"host_rng": torch.get_rng_state(), "device_rng": xm.get_rng_state()}
    checkpoint.save(checkpoint.to_host(content), kept)


def go_on():
    content, model = checkpoint.load(kept), make()
    model.load_state_dict(content["net"])
    optimizer = backend.prepare(model, make_optimizer, content["optimizer"])
    torch.set_rng_state(content["host_rng"])
    xm.set_rng_state(content["device_rng"])  # after the last sync before the first step
    return model, optimizer, content["step"]


model = make()
optimizer = backend.prepare(model, make_optimizer, None)
torch_xla.manual_seed(7)
train(model, optimizer, range(3))
keep(model, optimizer, step=3)
undisturbed = train(model, optimizer, range(3, 6))

model, optimizer, step = go_on()  # as another process would
resumed = train(model, optimizer, range(step, 6))
print("equal to the last bit:", torch.equal(undisturbed, resumed))
assert torch.equal(undisturbed, resumed)

# %% [markdown]
# **What just happened.** Five entries, and the second half of the training came out the same twice.
# Leave the device's random state out, and it does not: try it.

# %% [markdown]
# ## Exercise
#
# `weight.pkl` holds the best epoch. You want the **last** one, for the official code, whose test
# mode reads `torch.load(path)["state_dict"]`.
#
# Make `last.pkl` out of the run `first`, so that it would open there. Then prove that it is the
# last epoch: `api.test({"weight_path": …, "dataset_dir": …, "base_size": …, …})` has to give the
# IoU of the last line of `metrics.jsonl`. (A file without settings does not know how wide its
# network is: give `widths` and `depths` where they are not the official ones.)

# %% tags=["exercise"]
last_weights = LOCAL / "last.pkl"
last_weights.unlink(missing_ok=True)  # start over each time
tested_iou = ...  # from api.test(…)["corrected"]["iou"]

# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("The last epoch, in a file that the official code opens.") as expect:
    expect(
        last_weights.exists(), f"there is no {last_weights.name} yet: checkpoint.save writes one"
    )
    saved = torch.load(last_weights, weights_only=True)
    expect(
        "state_dict" in saved, f"the file holds {[*saved]}; the official code asks for state_dict"
    )
    wanted = checkpoint.load(LOCAL / "first" / checkpoint.CHECKPOINT)["net"]
    same = saved["state_dict"].keys() == wanted.keys() and all(
        torch.equal(saved["state_dict"][name], tensor) for name, tensor in wanted.items()
    )
    expect(same, "these are not the weights of the last epoch; they are in checkpoint.pkl, as net")
    expect.answered(tested_iou=tested_iou)
    logged = treated_badly[-1]["iou"]
    # Where XLA has trained, plain PyTorch rounds otherwise: a pixel may change sides.
    close = abs(tested_iou - logged) < (1e-9 if DEVICE == "cpu" else 0.01)
    expect(close, f"IoU {tested_iou:.4f}, but the last epoch had {logged:.4f}")

# %% tags=["solution"]
# @title Solution (open after trying)
content = checkpoint.load(LOCAL / "first" / checkpoint.CHECKPOINT)
checkpoint.save({"state_dict": content["net"]}, last_weights)

network = {name: settings[name] for name in ("widths", "depths")} if SMALL else {}
again = MSHNet(**network)
again.load_state_dict(torch.load(last_weights)["state_dict"])  # what the official code does

where = {"weight_path": str(last_weights), "dataset_dir": str(data), "device": "cpu"}
tested = api.test(where | network | {"base_size": SIZE, "batch_size": BATCH})
tested_iou = tested["corrected"]["iou"]
print("tested:", tested_iou, "· logged:", treated_badly[-1]["iou"])
assert {tensor.device.type for tensor in content["net"].values()} == {"cpu"}

# %% [markdown]
# ## Recap
#
# * Tensors to the host before saving, on all replicas; a temporary name, then a rename.
# * Open files with `weights_only=True`: anything else may run code, and the package refuses it.
# * A checkpoint holds weights, the optimizer's sums, random states and the position; samples follow
#   from seed, epoch and index.
# * `mshnet train … --save-dir DRIVE/RUN --resume auto` begins and goes on: after a kill, on an empty
#   machine, past a damaged file, to the same bits on the CPU.
# * The run lives on the local disk; Drive gets verified copies, and a failure of Drive costs a warning.
#
# **Next:** lesson 07, read the metrics report.
