# %% [markdown]
# # 05 · Eight cores
#
# **Train on eight cores instead of one (data parallel), see how they communicate, and recognise a
# deadlock.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * choose between one program over all cores (SPMD) and a replica on each core (launch);
# * find the all-reduce in a compiled program, and check that eight cores train like one;
# * choose a global batch that the cores can share, and that fills them;
# * recognise what goes wrong with several cores: a device opened too early, a replica that is
#   alone in a collective, a constant that differs, a replica that fails.
#
# **You need** lesson 04. Eight real cores are on Kaggle (Settings > Accelerator > TPU v5e-8) or on
# a Cloud TPU VM. Colab's TPUs have one core, so there, as on every machine without eight, this
# notebook takes eight virtual cores on the CPU.

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
import tempfile
from pathlib import Path

from tpuscope.engine import torch_xla as runtime

EIGHT = runtime.tpu_cores() == 8
SMALL = not EIGHT  # a narrow network and small images where the CPU does the work

if EIGHT:
    runtime.forget_stale_variables()  # Kaggle's, see lesson 01
else:
    os.environ["PJRT_DEVICE"] = "CPU"  # for every process that this notebook starts

PLATFORM = "TPU" if EIGHT else "CPU"
REPLICAS = 8 if EIGHT else 2  # for "launch": each virtual one takes a CPU core to compile
SIZE = 32 if SMALL else 128  # side of the images, pixels
BATCH = 8 if SMALL else 128  # global: of all cores together
SCENES = 36 if SMALL else 512
EPOCHS = 4 if SMALL else 8
WORK = Path(tempfile.mkdtemp(prefix="eight-cores-"))  # scripts, scenes, runs

print(f"8 {'cores of a TPU' if EIGHT else 'virtual cores: XLA on the CPU'}, {SIZE}×{SIZE}")
print(f"global batch {BATCH}, so {BATCH // 8} a core; files go to {WORK}")

# %% [markdown]
# For eight real cores, in a notebook that Kaggle opened with the badge above:

# %%
from course import clicks

clicks(
    ("Kaggle: Settings", ["Accelerator", "Language", "Persistence"], "Accelerator"),
    ("Accelerator", ["None", "GPU T4 x2", "GPU P100", "TPU v5e-8"], "TPU v5e-8"),
    ("Run", ["Run current cell", "Run all"], "Run all"),
)

# %% [markdown]
# ## Every training run in its own process
#
# The number of cores of a process is fixed when it opens the device, and a TPU belongs to the process
# that opened it. This kernel lives for hours, so **it never opens the device**. Whatever needs eight
# cores is a program of its own, started from a cell, as `!mshnet train --num-cores 8 …` is.
#
# Two helpers do that. `script` writes functions of this notebook to a file, the last one called
# with the arguments of the command line. `run` starts a Python process, prints what it prints, and
# ends it at a time limit: a program of several cores that goes wrong often does not fail, it hangs.

# %%
import inspect
import threading
import time


def script(*functions):
    """A Python file with these functions; it calls the last one."""
    name = functions[-1].__name__
    parts = ["import sys", *(inspect.getsource(function) for function in functions)]
    parts.append(f'if __name__ == "__main__":\n    {name}(*sys.argv[1:])\n')
    path = WORK / f"{name}.py"
    path.write_text("\n\n".join(parts))
    return path


def run(*command, limit=1800, **variables):
    """Run Python with these arguments and environment variables, for `limit` seconds at most."""
    process = subprocess.Popen(
        [sys.executable, "-u", *map(str, command)],
        env=os.environ | {"PYTHON_COLORS": "0"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    alarm = threading.Timer(limit, process.kill)
    alarm.start()
    start, text = time.perf_counter(), ""
    for line in process.stdout:  # until the last process that could write here has ended
        print(line, end="")
        text += line
    code = process.wait()
    alarm.cancel()
    how = f"exit code {code}" if code >= 0 else "ended by the time limit"
    print(f"[{how}, {time.perf_counter() - start:.0f} s]")
    return subprocess.CompletedProcess(command, code, text)


# %% [markdown]
# ## Two ways to use eight cores
#
# | | SPMD, `--strategy spmd` (default) | replicas, `--strategy launch` |
# |---|---|---|
# | processes | one for all cores | one a core |
# | a line of your code sees | the global batch | its replica's part of the batch |
# | gradients | the compiler puts the all-reduce in | you ask for it, between backward and update |
# | batch norm | over the global batch | over a replica's part; averaged after each epoch |
# | losses | those of one core, up to rounding | other ones |
# | weights at the start | there is one model | replica 0's, broadcast to all |
# | metrics | there is one result | added up over the replicas |
# | what can hang | no core has a path of its own | all, when one replica takes another path |
# | GPU reader | DistributedDataParallel with SyncBatchNorm, but in one process | DistributedDataParallel |
#
# Both are **data parallel**: every core holds the whole model and works on its part of each batch.

# %% [markdown]
# ## SPMD by hand
#
# SPMD stands for single program, multiple data. You write the program for one large device, and
# declare how each input is sharded over the cores. Then the compiler partitions the program. Here is all of
# it on a tiny model:


# %%
def spmd_by_hand():
    import os

    os.environ.setdefault("CPU_NUM_DEVICES", "8")  # virtual cores; means nothing to a TPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA announces another partitioner
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()  # before the device is opened
    device = torch_xla.device()  # all cores as one
    cores = xr.global_runtime_device_count()
    mesh = xs.Mesh(list(range(cores)), (cores,), ("data",))  # a row of cores; the axis has a name

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1)
    ).to(device)
    for parameter in model.parameters():
        xs.mark_sharding(parameter, mesh, (None,) * parameter.dim())  # every core has all of it

    images = torch.rand(16, 1, 8, 8).to(device)
    xs.mark_sharding(images, mesh, ("data", None, None, None))  # the batch axis is cut
    for shard in xs.wrap_if_sharded(images).local_shards:
        rows = shard.indices[0]
        print(f"{shard.shard_device} images {rows.start} to {rows.stop - 1}", *shard.data.shape)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(images).square().mean()  # from here on an ordinary step
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    print(f"loss {loss.item():.6f}, {len(list(model.parameters()))} parameters")


DUMP = f"--xla_dump_to={WORK / 'programs'} --xla_dump_hlo_as_text"  # keep what is compiled
done = run(
    script(spmd_by_hand),
    XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {DUMP}",
    LIBTPU_INIT_ARGS=f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP}",  # the TPU's compiler
)
assert done.returncode == 0 and "images 14 to 15 2 1 8 8" in done.stdout

# %% [markdown]
# **What just happened.** Each core holds two of the sixteen images, and the code of the step does
# not mention cores. For a model of your own, mark **everything that outlives a step**: parameters,
# buffers (batch norm), the optimizer's state, a moving average of weights. What is forgotten makes
# the step compile twice. And with a loader, let the loader cut the batches. `mark_sharding` on a
# batch that `MpDeviceLoader` has uploaded fetches it and uploads it once more, in every step:
#
# ```
# across = xs.ShardingSpec(mesh, ("data", None, None, None))
# feed = MpDeviceLoader(loader, device, input_sharding=across)  # batches of such tensors only
# feed = MpDeviceLoader(loader, device, input_sharding={  # or batches that are dicts
#     "image": across, "label": xs.ShardingSpec(mesh, ("data",))})
# ```
#
# Back to the program. Its loss is a mean over all sixteen, so somewhere the cores must have communicated. We
# asked XLA to keep its programs as text. The program of the step, before and after the compiler:

# %%
import re


def all_reduces(pattern):
    """Shapes that are reduced over the cores in the programs of the files that match."""
    text = "".join(path.read_text() for path in (WORK / "programs").glob(pattern))
    found = re.findall(r"= (.+?) all-reduce(?:-start)?\(.*?replica_groups=(\{\{.*?\}\}|\S+),", text)
    return [(re.sub(r"\{.*?\}", "", shape), cores) for shape, cores in found]


before = all_reduces("*SyncTensorsGraph*before_optimizations.txt")
after = all_reduces("*SyncTensorsGraph*after_optimizations.txt")
print(len(before), "all-reduces before,", len(after), "after:")
for shape, cores in after:
    print(f"{shape:<14} over cores {cores}")
if SMALL:  # a TPU's compiler may merge some of them
    assert len(before) == 0 and len(after) == 5

# %% [markdown]
# **What just happened.** An **all-reduce** adds up one array over all cores and gives everyone the
# sum. The compiler put in five: one for the loss, and one for the gradient of each of the four
# parameters. Nobody wrote them, so nobody can forget one. That is why this is the package's default.
#
# The choice is the compiler's, and another one chooses otherwise. The TPU's merges several arrays
# into one larger all-reduce, and for a batch norm it reduces two sums, where the CPU's gathers
# whole maps on every core (seen by compiling such a model for eight v5e cores on a machine without
# a TPU). So count collectives for the machine that you mean; lesson 09 shows how.

# %% [markdown]
# ## The same training run on one core and on eight
#
# In the package all this is `Backend` and `DataMesh` (`mshnet/training/backend.py`,
# `tpuscope/engine/spmd.py`), and for you it is one flag:
#
# ```
# mshnet train --dataset-dir datasets/IRSTD-1k --batch-size 256 --use-tpu --num-cores 8
# ```
#
# Without eight TPU cores put `PJRT_DEVICE=CPU` before it. The network's width has no flag, so here
# we start what lies behind the command, `mshnet.api.train`, in a script. Warm-up epochs only:
# that is one graph less to compile.

# %%
import json

from mshnet.data.scenes import write_scenes
from mshnet.training.run_dir import read_log

SETTINGS = {
    "dataset_dir": str(write_scenes(WORK / "scenes", train=SCENES, test=SCENES // 3, size=SIZE)),
    "batch_size": BATCH,
    "base_size": SIZE,
    "crop_size": SIZE,
    "epochs": EPOCHS,
    "warm_epoch": EPOCHS,
    "lr": 0.01,  # a fifth of the recipe's: rounding noise grows more slowly, see below
    "device": "tpu",  # XLA; PJRT_DEVICE says on what
    "widths": (2, 4, 4, 8, 8) if SMALL else (16, 32, 64, 128, 256),
    "depths": (1, 1, 1, 1, 1) if SMALL else (1, 2, 2, 2, 2),
    "workers": 0 if SMALL else 8,
}


def training(settings):
    import json

    from mshnet import api

    api.train(json.loads(settings))


def train(name, **changes):
    """A training in a process of its own; its log, one dict an epoch."""
    settings = SETTINGS | changes | {"save_dir": str(WORK / name)}
    done = run(script(training), json.dumps(settings))
    assert done.returncode == 0
    return read_log(WORK / name)


one = train("one-core", num_cores=1)

# %%
eight = train("eight-cores", num_cores=8)

# %% [markdown]
# The same seed, the same global batches, the same augmentation. Side by side:

# %%
import matplotlib.pyplot as plt

differences = [abs(b["loss"] - a["loss"]) / a["loss"] for a, b in zip(one, eight)]
print("epoch   1 core     8 cores    differ by   compiled")
for a, b, difference in zip(one, eight, differences):
    counts = f"{a['compilations']} and {b['compilations']}"
    print(
        f"{a['epoch'] + 1:>5}   {a['loss']:.6f}   {b['loss']:.6f}   {difference:.1e}     {counts}"
    )

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
epochs = range(1, EPOCHS + 1)
left.plot(epochs, [record["loss"] for record in one], color="#0a84ff", linewidth=5, label="1 core")
left.plot(epochs, [record["loss"] for record in eight], "o--", color="#ff9f0a", label="8 cores")
left.set(title="training loss", xlabel="epoch", xticks=epochs)
left.legend()
right.semilogy(epochs, [max(difference, 1e-8) for difference in differences], "o-", color="#ff9f0a")
right.set(title="relative difference", xlabel="epoch", xticks=epochs)
plt.show()

assert differences[0] < (1e-4 if SMALL else 1e-2), differences  # a TPU multiplies in bfloat16
assert [r["compilations"] for r in one] == [r["compilations"] for r in eight]

# %% [markdown]
# **What just happened.** The first epoch agrees to five digits or more. Eight cores add the same
# numbers in another order, so the last digits differ, and the first steps of Adagrad make that
# more: they divide each gradient by its own size, the rounding noise of a tiny gradient included.
# From there the two runs drift apart, the faster the larger the learning rate. What counts is that
# they start as one, and that eight cores compiled no more than one did.
#
# On virtual cores nothing gets faster, they share your CPU. What they show is that it is right.

# %% [markdown]
# ## Global batch and per-core batch
#
# `--batch-size` is the **global** batch: the images of one update of the weights, however many
# cores share them. So the same flags mean the same training run on one core and on eight, and the
# number must be a multiple of the cores:

# %%
done = run("-m", "mshnet", "train", "--use-tpu", "--num-cores", 8, "--batch-size", 36)
assert done.returncode == 2 and "use 32 or 40" in done.stdout

# %% [markdown]
# **What just happened.** One line names batch sizes that work, and exit code 2 means that the request
# was wrong: nothing was trained.
#
# Divisible is not yet good. Lesson 01 showed that a TPU lays arrays over 128 lanes and pads the
# rest. In MSHNet's first maps, 16 channels at 256×256, the batch lies there:

# %%
print("global batch   a core   lanes that hold an image")
for batch in (32, 128, 256, 1024):
    images = batch // 8
    print(f"{batch:>12}   {images:>6}   {images / 128:.0%}")

# %% [markdown]
# What that costs: the memory traffic of a training step at 256×256 in bfloat16, with the network
# written as for any device, is **2.43 GB an image at a batch of 32 a core, and 0.79 GB at 128**. So
# on a TPU the same network is computed in another form, which fills the lanes with columns of the
# maps: 0.94 and 0.56 GB, and 1.5 GB at 4 a core. (The numbers are estimates of the TPU's own
# compiler, which compiled the step for one v5e core on a machine without a TPU; lesson 09 shows
# how. Not measured on a TPU.)
#
# A global batch of 32 gives each of eight cores 4 images, and an image costs 1.6 times what it
# costs one core that has all 32. Eight cores are for large global batches. But a larger batch changes the optimization: at 256 images an update, an epoch of
# IRSTD-1k's 800 has 3 updates instead of 200 at the recipe's batch of 4. The learning rate 0.05 and
# the 400 epochs belong to that recipe and have to be tuned again.

# %% [markdown]
# ## A replica on each core
#
# The other strategy. `torch_xla.launch(function)` starts a process for every core and calls the
# function in each. What the replicas do together are **collectives**, which all of them must call in
# the same order. The package wraps this as `tpuscope.engine.replicas.launch`, whose function gets an object
# with the replica's number (`ordinal`), their `count`, and three collectives: `broadcast`,
# `optimizer_step`, `gather`. (`xmp.spawn(function, nprocs=8)`, which older guides have, is a
# ValueError today.)
#
# Without a TPU the replicas are processes with an XLA device each, and what a TPU reduces inside
# the compiled program is reduced **between two programs, on the host, by gloo** (PyTorch's
# collectives for CPUs). Everything above that is the same code, and makes most of the same
# mistakes.


# %%
def greet(replicas):
    import os

    import torch

    return replicas.gather(torch.tensor([replicas.ordinal, os.getpid()]))  # (count, 2), for all


def first_launch(count, platform):
    from tpuscope.engine.replicas import launch

    rows = launch(greet, (), int(count), platform)  # what replica 0 returned
    for ordinal, process in rows.tolist():
        print(f"replica {ordinal} of {count} is process {process}")


start = time.perf_counter()
done = run(script(greet, first_launch), REPLICAS, PLATFORM)
launch_seconds = time.perf_counter() - start
assert done.returncode == 0 and done.stdout.count("is process") == REPLICAS

# %% [markdown]
# **What just happened.** Every replica ran `greet` in a process of its own and knew its number, and
# after `gather` each of them held the rows of all. Now a training run. Each replica loads its own part
# of every batch, the gradients are averaged in every step, and after each epoch every replica
# hashes its weights and compares the hash with the others':

# %%
replicas = train("replicas", num_cores=REPLICAS, strategy="launch", epochs=2)
print()
for record, spmd in zip(replicas, eight):
    print(f"epoch {record['epoch'] + 1}: loss {record['loss']:.4f}, with SPMD {spmd['loss']:.4f}")
    print(f"         weights {record['weights']} in all {REPLICAS} replicas")
assert len({record["weights"] for record in replicas}) == 2  # they change from epoch to epoch

# %% [markdown]
# **What just happened.** There is one hash in the log because all replicas had it; with two
# different ones the run ends with "the replicas' weights differ". The loss is not SPMD's: batch
# norm saw a replica's part of the batch only, which makes it a slightly different network in
# training.

# %% [markdown]
# ## What goes wrong: the device was opened first
#
# The classic of notebooks. Any `tensor.to(torch_xla.device())` opens the device, and after that
# this process can neither start replicas nor turn to SPMD with another number of cores:


# %%
def device_first():
    import torch_xla

    from mshnet import api
    from tpuscope.errors import RequestError

    torch_xla.device()  # an innocent look at the device

    try:
        torch_xla.launch(print)
    except RuntimeError as error:
        print("torch_xla.launch:", error)
    try:
        api.train({"device": "tpu", "num_cores": 8, "batch_size": 8})
    except RequestError as error:
        print("mshnet:", error)


done = run(script(device_first), limit=300)
assert "Runtime is already initialized" in done.stdout and "process of its own" in done.stdout

# %% [markdown]
# **What just happened.** torch_xla names `xmp.spawn`, the older name of `torch_xla.launch`, and
# means the same. The fix is to avoid it: look with `runtime.tpu_chips()`, which opens
# nothing, and train in another process. If it has happened, restart the kernel: a device
# stays open until its process ends. (With `start_method="fork"`, which old guides recommend, it is the same.)

# %% [markdown]
# ## What goes wrong: one replica alone
#
# A collective waits until all have come. Here only replica 0 calls it, as with the well-known
#
# ```python
# if xm.is_master_ordinal():
#     xm.save(model.state_dict(), path)  # first runs what is pending, a sum over all included
# ```
#
# We give it half as long again as the whole first launch took.


# %%
def save_on_master(replicas):
    import time

    import torch

    if replicas.ordinal == 0:
        print("replica 0: saving, and meeting the others")
        replicas.gather(torch.tensor([0]))
        print("replica 0: saved")
    while True:  # the others train on
        time.sleep(1)


def alone(count, platform):
    from tpuscope.engine.replicas import launch

    launch(save_on_master, (), int(count), platform)


done = run(script(save_on_master, alone), REPLICAS, PLATFORM, limit=1.5 * launch_seconds)
assert done.returncode < 0 and "saved" not in done.stdout

# %% [markdown]
# **What just happened.** No error, no message, no end: a **deadlock**. In real training the others
# soon wait in another collective, and all replicas wait for each other. The signs are a cell that runs
# without end and a log that has stopped growing.
#
# The fix: **all replicas call what is collective, and only one of them writes.**
# The package's trainer lets all of them copy the weights to the host and compare hashes, and only
# then asks `backend.is_main_process`. Our time limit killed the launching process, and the replicas noticed
# and ended too: otherwise the cell would not have returned.

# %% [markdown]
# ## What goes wrong: a constant that differs
#
# Replicas must run **the same program**, because the cores meet inside it. Now remember from lesson
# 04 that a plain 0 or 1 becomes a constant of the graph. A replica's number is such a value. We
# trace what four replicas would compile, one after the other in one process:


# %%
def constants():
    import torch
    import torch_xla

    from tpuscope.engine import torch_xla as runtime

    device = torch_xla.device()
    x = torch.ones(4).to(device)
    ways = {
        "made on the device": lambda value: torch.full((1,), value, device=device),
        "made on the host": lambda value: torch.tensor([value]).to(device),
    }
    for way, make in ways.items():
        programs, before = [], runtime.counters()
        for ordinal in range(4):
            y = (x * make(float(ordinal))).sum()
            text = torch_xla._XLAC._get_xla_tensors_hlo([y])
            programs.append(text)
            torch_xla.sync()
            del y
        same_as = [programs.index(text) for text in programs]
        compiled = (runtime.counters() - before).compilations
        print(f"{way}: replicas 0 1 2 3 have the program of {same_as}, {compiled} compiled")
        for line in programs[1].splitlines():
            if "f32[] constant(1)" in line or "f32[1]{0} parameter" in line:
                print("   in replica 1:", line.strip())


done = run(script(constants), limit=300)
assert "device: replicas 0 1 2 3 have the program of [0, 1, 2, 2], 3 compiled" in done.stdout
assert "host: replicas 0 1 2 3 have the program of [0, 0, 0, 0], 1 compiled" in done.stdout

# %% [markdown]
# **What just happened.** Made on the device, the number is written into the programs of replicas 0
# and 1, and only from 2 on it is an input. That makes three programs, and the collectives of
# different programs need not match: the replicas then deadlock, without a message.
# (Seen with replicas as threads on a CPU; what a TPU does was not tried.) Made on the host and
# moved, it is data, and the program is one.
#
# (Our virtual replicas would not even notice, because they meet on the host, between programs. This
# is the mistake that you find on the real machine, unless you look at the graph as above.)

# %% [markdown]
# ## What goes wrong: a replica fails
#
# An image that cannot be read, or out of memory: one replica raises, while the others wait in
# a collective. Without a watching process they would hang.


# %%
def broken(replicas):
    import torch

    if replicas.ordinal == 1:
        raise ValueError("replica 1 found a broken image")
    replicas.gather(torch.tensor([0]))


def one_fails(count, platform):
    from tpuscope.engine.replicas import ReplicaFailed, launch

    try:
        launch(broken, (), int(count), platform)
    except ReplicaFailed as error:
        sys.exit(f"a replica failed, all were ended:\n{error}")


done = run(script(broken, one_fails), REPLICAS, PLATFORM, limit=300)
assert done.returncode == 1 and done.stdout.count("ValueError: replica 1") == 1

# %% [markdown]
# **What just happened.** The launching process watched the replicas. When one failed it ended the
# others, and raised `ReplicaFailed` with the one traceback that matters, not with those of the
# replicas that lost their connection afterwards. `mshnet train` does the same and exits with 1, so
# a script around it can resume (lesson 06).

# %% [markdown]
# ## This kernel is still free

# %%
print("device opened by this kernel:", runtime.is_open())
assert not runtime.is_open()

# %% [markdown]
# ## Exercise
#
# Replica 3 of 8 trains with a global batch of 32. **Which samples of batch 0 does it load: how
# many, and where do they stand in the epoch's shuffled order?** Predict. Then write `loaded_by`
# with `EpochBatches` and `DataShard` from `mshnet.data.loader`; it yields batches as lists of pairs
# (epoch, index). The order is
# `numpy.random.default_rng([seed, epoch]).permutation(length)`.
#
# Then think further: with 100 samples, do the eight replicas together load every sample once? And
# what would eight cores do that each shuffle the whole data set for themselves?


# %% tags=["exercise"]
import numpy as np

LENGTH, SEED, GLOBAL = 100, 0, 32
places = ...  # of replica 3's images in the order of epoch 0, batch 0: (first, last)
left_out = ...  # how many of the 100 samples no replica loads in an epoch


def loaded_by(replica, epoch=0):
    """Sample numbers that a replica loads in an epoch, as an array (batches, images a replica)."""
    ...  # your code: EpochBatches(LENGTH, GLOBAL, SEED, DataShard(…)) yields a replica's batches


# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("Row for row, the replicas load the batches of one core.") as expect:
    expect.answered(places=places, left_out=left_out, loaded_by=loaded_by(3))
    order = np.random.default_rng([SEED, 0]).permutation(LENGTH)
    expect(tuple(places) == (12, 15), f"replicas 0 to 2 have places 0 to 11; not {places}")
    got = np.asarray(loaded_by(3))
    hint = f"3 batches of 4 indices, not an array of shape {got.shape}; of each pair the index"
    expect(got.shape == (3, 4), hint)
    expect((got[0] == order[12:16]).all(), f"batch 0: {got[0]} instead of {order[12:16]}")
    together = np.concatenate([loaded_by(replica) for replica in range(8)], axis=1)
    expect((together.ravel() == order[:96]).all(), "together they must be the batches of one core")
    later = np.random.default_rng([SEED, 1]).permutation(LENGTH)[12:16]
    expect(
        (np.asarray(loaded_by(3, 1))[0] == later).all(), "epoch 1 has another order: use `epoch`"
    )
    expect(left_out == 4, f"3 batches of 32 are loaded, so of 100 samples not {left_out} stay out")


# %% tags=["solution"]
# @title Solution (open after trying)
from mshnet.data.loader import DataShard, EpochBatches


def loaded_by(replica, epoch=0):
    """Sample numbers that a replica loads in an epoch, as an array (batches, images a replica)."""
    batches = EpochBatches(LENGTH, GLOBAL, SEED, DataShard(replica, 8))
    batches.epoch = epoch
    return np.array([[index for _, index in batch] for batch in batches])


order = np.random.default_rng([SEED, 0]).permutation(LENGTH)
print("replica 3, batch 0:", loaded_by(3)[0], "= places 12 to 15 of", order[:16])
places = (12, 15)

together = np.concatenate([loaded_by(replica) for replica in range(8)], axis=1)
assert len(np.unique(together)) == 96  # none twice
never = []
for epoch in (0, 1):
    loaded = np.unique([loaded_by(replica, epoch) for replica in range(8)])
    never.append(sorted({*range(LENGTH)} - {*loaded.tolist()}))
print("left out in epochs 0 and 1:", *never)
left_out = len(never[0])
assert len(never[1]) == left_out and never[0] != never[1]

# %% [markdown] tags=["solution"]
# Four images, at places 12 to 15. Together the replicas load 96 samples once, row for row the
# batches of one core. The 4 that do not fill a batch are left out, and another shuffle leaves out
# others. Cores that each shuffle the whole set for themselves each go through all of it: eight
# times the samples, and an "epoch" that takes as long as on one core.

# %% [markdown]
# ## Recap
#
# * SPMD is one program that the compiler cuts over the cores, and it is the default; launch is a
#   replica on each core, with its own batch norm and with collectives that all must call.
# * `--xla_dump_to` shows the compiled program and its all-reduces; on the same global batch the
#   first epoch of eight cores is that of one, and so is the number of compilations.
# * `--batch-size` is global and a multiple of the cores; an image gets cheaper the more images
#   a core has, up to 128.
# * Eight cores belong in a process of their own; all replicas call every collective; what differs
#   by replica comes from the host; when one fails, all must end.
#
# **Next:** lesson 06, save and resume on Drive.
