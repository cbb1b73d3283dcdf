# %% [markdown]
# # 10 · Image processing with torchax
#
# **Write crop, resize and blur once in PyTorch, run them by JAX on its mesh and by torch_xla, and know
# what each rounding and each changing shape costs.**
#
# {{badges}}
#
# {{time: 20 min on v5e-1}}
#
# **You will be able to**
#
# * run PyTorch functions, and a whole network, on JAX through torchax, eager and jitted;
# * make a crop whose box changes a program that does not, and show by counts what that saves;
# * say how far a resize is from OpenCV's, on which scale, and why bfloat16 is so much farther;
# * tell tracing and compiling from running, and shard a batch over a mesh;
# * see what torchax 0.0.13 cannot take, and get past it;
# * train MSHNet by one jitted function of JAX, and compile it for eight TPU cores.
#
# **You need** lessons 04 and 09. This is the first of four labs: each is a lesson about a system of
# its own, over a small module in `labs/`.

# %% [markdown]
# ## Setup
#
# torch, torch_xla, jax and numpy stay as the runtime has them. The second cell installs what Colab's
# image lacks: **torchax**, which runs PyTorch on JAX, and **OpenCV**, to compare with; **torchvision**
# is there. A trap: the package of torch_xla 2.9.0 holds a torchax of its own, 0.0.6, and whichever is
# installed later lies on top. So look at `torchax.__version__`, not at what pip says.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("mshnet") is None:  # a fresh Colab or Kaggle session
    # --no-deps: the runtime's torch and torch_xla belong together and stay as they are.
    package = "git+{{repository}}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", package], check=True)

# %%
from course import checkout, install

install("torchax==0.0.13", "torchvision==0.24.0", "opencv-python-headless==5.0.0.93")
sys.path.insert(0, str(checkout()))

# %% [markdown]
# A TPU has one user at a time, and both jax and torch_xla open it. So this notebook is jax's, and
# torch_xla gets a process of its own, with XLA on the CPU.

# %%
import os

from tpuscope.engine import torch_xla as runtime

TPU = runtime.tpu_chips() > 0
SMALL = not TPU  # fewer and smaller images where the CPU does the work

os.environ["JAX_PLATFORMS"] = "tpu,cpu" if TPU else "cpu"  # all of these before jax is imported
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # virtual cores, for the mesh below

SIZE = 128 if SMALL else 256  # side of the frames, pixels
COUNT = 8 if SMALL else 32

# %%
import logging
import warnings

logging.getLogger().setLevel("ERROR")  # torchax says that it registers an operation twice
import jax
import numpy as np
import torch
import torchax

# torchax asks for int64 where jax has int32, and wraps arrays that must not be written to.
warnings.filterwarnings("ignore", message="Explicitly requested dtype")
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# A TPU multiplies float32 matrices in bfloat16 passes unless the precision is set.
jax.config.update("jax_default_matmul_precision", "highest")
print("torchax", torchax.__version__)
print(jax.devices()[0].platform.upper(), "and", len(jax.devices("cpu")), "virtual CPU cores")

assert torchax.__version__ == "0.0.13"

# %% [markdown]
# ## A box from a mask
#
# A detector's mask says where the target is. What is cut out should show some surroundings, not be
# smaller than a network can use, have the shape that it needs, and lie inside the frame: padding,
# minimum size, aspect ratio, in this order, and last the frame.

# %%
from matplotlib.patches import Rectangle

from labs.image_processing.images import box_of, frames
from tpuscope.figure import Picture

images, masks, boxes = frames(COUNT, SIZE)
mask = masks[0, 0].numpy()
options = {
    "tight": {},
    "padding=6": {"padding": 6},
    "min_size=40": {"min_size": 40},
    "aspect=2": {"padding": 8, "min_size": 24, "aspect": 2.0},
}
figure = Picture(figsize=(5, 5), dpi=80, layout="constrained")
axis = figure.subplots()
axis.imshow(images[0, 0], cmap="gray", vmin=0, vmax=255)
styles = (("#ff453a", 6), ("#ffb000", 3), ("#35c759", 2.5), ("#0a84ff", 1.5))
for (name, how), (colour, width) in zip(options.items(), styles):
    box = box_of(mask, **how)
    print(f"{name:<12}{box}")
    corner = (box.left - 0.5, box.top - 0.5)
    axis.add_patch(
        Rectangle(corner, box.width, box.height, fill=False, color=colour, lw=width, label=name)
    )
axis.legend(loc="best", fontsize=8)
axis.set(xticks=[], yticks=[])
figure

# %% [markdown]
# **What just happened.** The box is computed on the host, in NumPy. That is no accident: where the
# target is depends on the pixels, and a compiled program has shapes that do not depend on anything.
# Whoever searches the mask on the device (`torch.nonzero`) gets a result of unknown shape, and
# torch_xla has no program for it.
#
# The box then has to get into the program. There are two ways, and the difference is the subject of
# the next section: as a slice, `images[..., top:bottom, left:right]`, or as data.

# %% [markdown]
# ## What a moving crop costs
#
# The same five frames, each cropped by its own box and resized to 64×64, under torch_xla. First by
# slices and `F.interpolate`, as one writes it; then by `crop_resize`, which takes the box as a tensor
# of four numbers. torch_xla's process watches both and hands back the reports of lesson 07.

# %%
from labs.image_processing import on_torch_xla

answer = on_torch_xla.under_torch_xla(count=5, size=SIZE)
print(answer.before["text"], "\n")
print(
    f"compilations before: {answer.before['compilations']}, after: {answer.after['compilations']}"
)

assert len(set(boxes[:5])) == 5
assert answer.before["compilations"] == 5 and answer.after["compilations"] == 1

# %% [markdown]
# **What just happened.** The ends of a slice are a part of the graph, and so are the shapes behind
# it: five boxes are five programs, and a data set of a thousand frames would be a thousand. With the
# box as data one program serves all of them.
#
# The cure is arithmetic. Bilinear resizing is linear and works along each axis by itself, so it is a
# product with a matrix of weights, `rows @ image @ columnsᵀ`. Row i of such a matrix says how much
# each pixel of the source counts in pixel i of the result. A box only moves and stretches the weights,
# so cropping costs nothing extra, and the shapes are the frame's and the result's, always. With
# `antialias` the weights reach over all source pixels that fall on one of the result. That also cures
# a second ailment: torch_xla 2.9 has no program for `F.interpolate(antialias=True)`, which runs on
# the host.
#
# It is the same function, not a similar one:

# %%
from torch.nn import functional as F

from labs.image_processing.images import SIZE as CROP
from labs.image_processing.images import as_data, crop, crop_resize

for antialias in (True, False):
    found = crop_resize(images, as_data(boxes), antialias=antialias)
    right = torch.cat(
        [
            F.interpolate(crop(image, box), size=CROP, mode="bilinear", antialias=antialias)
            for image, box in zip(images.split(1), boxes)
        ]
    )
    away = (found - right).abs().max().item()
    print(f"antialias={antialias!s:<6} largest difference {away:.6f} of 255 grey levels")
    assert away < 0.01

# %% [markdown]
# ## torchax: PyTorch's functions, JAX's arrays
#
# torchax gives PyTorch a device named `jax`. A tensor there holds a `jax.Array`, and while torchax is
# *enabled*, every PyTorch operation on it is one of JAX. Enabled means either of two: for a block,
# `with env:`, or from here on, `torchax.enable_globally()`, which in 0.0.13 returns nothing.

# %%
from labs.image_processing import on_jax
from labs.image_processing.images import gaussian_blur, process

env = on_jax.environment()  # torchax.default_env(), with two operations fixed; see below

torchax.enable_globally()
on_device = images.to("jax")
print(type(on_device).__name__, on_device.device, "holding a", type(on_device.jax()).__name__)
blurred = gaussian_blur(on_device)
torchax.disable_globally()

with env:
    again = gaussian_blur(on_device)

assert np.array_equal(blurred.numpy(), again.numpy())
print(
    "largest difference from eager:", np.abs(blurred.numpy() - gaussian_blur(images).numpy()).max()
)

# %% [markdown]
# **What just happened.** `gaussian_blur` is plain PyTorch and ran unchanged. Operation by operation,
# though: each was compiled and launched by itself. `.numpy()` fetches; `.jax()` gives the array
# without a copy; `.torch()` makes it a CPU tensor. Of the two ways take the block: while torchax is
# enabled, tensors on the CPU may be met by operations that expect JAX's, as you will see.
#
# For speed the whole pipeline (crop, resize, blur) becomes one program:

# %%
jitted = torchax.interop.jax_jit(process)
with env:
    box_data = as_data(boxes).to("jax")
    runs = on_jax.timed_runs(jitted, on_device, box_data)
for number, run in enumerate(runs, start=1):
    parts = f"tracing {1e3 * run.tracing:>7.1f}, compiling {1e3 * run.compiling:>7.1f}"
    print(f"run {number}: {1e3 * run.seconds:>8.1f} ms, of that {parts}")

assert [run.compiling > 0 for run in runs] == [True, False, False, False, False]

# %%
on_jax.runs_picture(runs)

# %% [markdown]
# **What just happened.** JAX works asynchronously: a call returns before the result is there, so each
# run waits for it (`jax.block_until_ready`), or the clock would show nothing. The first call calls the
# Python function with placeholders and records what it does (tracing, lowering included), and
# compiles the program; later calls find it in the cache by the shapes and types of their inputs.
# (The document that this lab realises saw 0.58 s against 0.028 s on its TPU.)
#
# Other boxes are other data, so JAX compiles nothing for them either. And all three ways agree:

# %%
before = on_jax.compilations()
with env:
    jitted(on_device, as_data(boxes[::-1]).to("jax"))
    by_jax = jitted(on_device, box_data).numpy()
print("compilations for other boxes:", on_jax.compilations() - before)

eager = process(images, as_data(boxes)).numpy()
print("torchax from eager, at most  ", np.abs(by_jax - eager).max())
print("torch_xla from eager, at most", np.abs(answer.processed - eager[:5]).max())

assert on_jax.compilations() == before
assert np.abs(by_jax - eager).max() < 0.01 and np.abs(answer.processed - eager[:5]).max() < 0.01

# %% [markdown]
# ## A mesh
#
# JAX's devices form a mesh with named axes, and an array can be laid over it. The program stays as it
# is; the compiler splits it. Here are eight virtual cores on the CPU. A Colab v5e has one core, where
# the mesh would be of size 1.

# %%
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("batch",), devices=jax.devices("cpu"))
over_batch = NamedSharding(mesh, PartitionSpec("batch"))

with env:
    sharded, sharded_boxes = images.to("jax"), as_data(boxes).to("jax")
    for tensor in (sharded, sharded_boxes):
        tensor.apply_jax_(jax.device_put, over_batch)
    by_eight = jitted(sharded, sharded_boxes)

shard = by_eight.jax().addressable_shards[3]
print("in:  ", sharded.jax().sharding.spec, "on", len(sharded.jax().sharding.device_set), "devices")
print("out: ", by_eight.jax().sharding.spec, "- core 3 has images", shard.index[0])
print("largest difference from eager:", np.abs(by_eight.numpy() - eager).max())

assert len(by_eight.jax().sharding.device_set) == 8
assert shard.data.shape[0] == COUNT // 8 and np.abs(by_eight.numpy() - eager).max() < 0.01

# %% [markdown]
# **What just happened.** `apply_jax_` is torchax's way to call a function of JAX on the array inside.
# Each core has its own images from the beginning to the end, and nothing was exchanged, because no
# image needs another. In a training step they do: batch norm and gradients, at the end of this lab.

# %% [markdown]
# ## Accuracy: OpenCV, torchvision, and bfloat16
#
# Do two libraries resize alike? The document measured torchvision against OpenCV: at most 0.0078 in
# float32, at the median 0.0008; at most 1.7109 in bfloat16. It does not say of what. So: an infrared
# frame and a synthetic one of pure noise, both from 0 to 255, made smaller without antialiasing,
# which OpenCV's bilinear resize does not have.

# %%
from labs.image_processing import accuracy
from mshnet.data.scenes import render_scene

TO = (224, 224)
subjects = {"infrared": render_scene(seed=0, index=3, size=512)[0], "noise": accuracy.noise(512)}
for name, frame in subjects.items():
    found = accuracy.accuracy(frame, TO)
    print(accuracy.table(found, f"{name}, 0 to 255"), "\n")
    assert found["torchvision, float32"]["max"] < 0.02
    assert found["F.interpolate, bfloat16"]["max"] > 0.5
print(accuracy.table(accuracy.accuracy(subjects["noise"] / 255, TO), "noise, 0 to 1"))

# %%
accuracy.difference_picture(subjects["infrared"], TO, ["torchvision, float32", "resize, bfloat16"])

# %% [markdown]
# **What just happened.** Numbers like the document's arise on the scale from 0 to 255: on a scale from
# 0 to 1 everything is 255 times smaller. In float32 the two compute the same formula, and what
# differs is how the *place* is rounded at which a pixel is read: a place of some hundreds of pixels
# has an error of about 0.00003, and next to an edge that is multiplied by the step in grey level. So
# the difference grows with the frame and is largest in noise. Nobody sees 0.01 of 255.
#
# bfloat16 has 8 bits for the digits of a number. Which of its roundings costs what?

# %%
losses = accuracy.bfloat16_losses(subjects["noise"], TO)
print(accuracy.table(losses, "rounded to bfloat16, noise"))

assert losses["the image"]["max"] == 0 and losses["and the result"]["max"] <= 0.5
assert losses["and what is between the axes"]["max"] > 2 * losses["and the result"]["max"]

# %% [markdown]
# **What just happened.** The image loses nothing: 8 bits hold all whole numbers up to 256. The result
# is a fraction, and between 128 and 256 the numbers of bfloat16 are 1 apart: up to half a grey level,
# and that is all that torchvision loses, because it computes bfloat16 images in float32. The weights
# are rounded too, and no longer add up to 1; and so is what stands between the two axes. That is
# arithmetic in bfloat16 itself, as PyTorch's own kernel does it, and where a maximum like the
# document's comes from.
#
# For looking at pictures it hardly matters. For targets of a few pixels and a few grey levels it does:
# resize in float32, and let the network begin with bfloat16.

# %% [markdown]
# ## What torchax cannot take
#
# Reading a file, first: `torchvision.io.decode_image`, with the content of a PNG as a tensor.

# %%
import io

from PIL import Image
from torchvision.io import decode_image

file = io.BytesIO()
Image.fromarray(images[0, 0].numpy().astype(np.uint8)).save(file, "PNG")
content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
refused = ""
try:
    with env:
        decode_image(content.to("jax"))
except RuntimeError as error:
    refused = str(error).splitlines()[0]
print("on the device jax:", refused)

assert "CPU tensor" in refused

# %% [markdown]
# So leave the content on the CPU? In a process of its own, for a reason that you will see:

# %%
CRASH = """
import io
import numpy as np, torch, torchax
from PIL import Image
from torchvision.io import decode_image

file = io.BytesIO()
Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "PNG")
content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
print("without torchax:", tuple(decode_image(content).shape), flush=True)
with torchax.default_env():
    decode_image(content)
"""


def elsewhere(script):
    """A process that runs a script on the CPU: its exit code, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        # This notebook has the TPU; and plain text is searched below.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHON_COLORS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


code, said = elsewhere(CRASH)
print(*[line for line in said.splitlines() if line.startswith("without")])
print("with torchax: exit code", code)

assert code < 0

# %% [markdown]
# **What just happened.** `decode_image` is C++ for the CPU. It rejects JAX tensors. And while
# torchax is enabled even a tensor on the CPU ends the process: -11 is a segmentation fault. Nothing
# that runs in C++ by itself should be called inside of the block.
#
# The way round: decode outside, by PIL, and send the pixels.

# %%
pixels = torch.from_numpy(np.array(Image.open(file)))  # a copy, which may be written to
with env:
    decoded = pixels.to("jax")
print(type(decoded).__name__, decoded.dtype, tuple(decoded.shape))

assert np.array_equal(decoded.numpy(), images[0, 0].numpy())

# %% [markdown]
# Training finds two more, which `on_jax.environment()` fixes by registering functions of ours:
#
# | operation | in torchax 0.0.13 | ours |
# |---|---|---|
# | `F.batch_norm` | trains, but silently never updates the running statistics | written out in PyTorch |
# | `amax` | where the compiler computes its input twice, the gradient may be 0/0 | the place of the maximum |
#
# The first, as it comes:

# %%
PLAIN = """
import torch, torchax

norm = torch.nn.BatchNorm2d(1)
with torchax.default_env():
    norm.to("jax")(torch.rand(8, 1, 4, 4).to("jax") + 100)
    print("running mean after a batch around 100.5:", norm.running_mean.tolist())
"""
_, said = elsewhere(PLAIN)
[shown] = [line for line in said.splitlines() if line.startswith("running")]
print(shown)

assert shown.endswith(" [0.0]")

# %% [markdown]
# ## MSHNet under torchax
#
# The detector is PyTorch as well. `torch.func.functional_call` runs a module with parameters that are
# handed to it, which is what JAX expects of a model: a function of its parameters. The narrow network has
# the same weights here and in torch_xla's process, which left its logits for the same five frames.

# %%
from labs.image_processing.network import narrow_network

network = narrow_network()
network.eval()


def forward(parameters, frames):
    return torch.func.functional_call(network, parameters, (frames, True))[1]


with env:
    weights = env.to_xla({name: value.detach() for name, value in network.state_dict().items()})
    logits = torchax.interop.jax_jit(forward)(weights, images[:5].to("jax") / 255).numpy()
away = np.abs(logits - answer.logits).max()
print(f"logits up to {np.abs(logits).max():.2f}; torchax from torch_xla at most {away:.1e}")

assert away < (1e-3 if TPU else 1e-5)

# %% [markdown]
# ## One training step, one function
#
# Under torch_xla a step is a stretch of Python that leaves a graph behind. Under JAX it is a function:
# parameters, batch norm's statistics and Adagrad's sums go in, the new ones come out, and nothing is
# changed in place. `on_jax.training_step` writes forward, `SLSIoULoss` and update in PyTorch; the
# gradient comes from `jax.value_and_grad`. `donate_argnums` gives the old state's memory to the new
# one.

# %%
import copy

from mshnet import SLSIoULoss

BATCH = 4
batch = images[:BATCH] / 255, masks[:BATCH]
network = narrow_network()
twin = copy.deepcopy(network)  # for eager PyTorch
optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.05)

step = on_jax.training_step(network, learning_rate=0.05)
jitted_step = jax.jit(step, donate_argnums=0)
state = on_jax.initial_state(network)
for number in range(1, 4):
    state, loss = jitted_step(state, *(tensor.numpy() for tensor in batch))
    optimizer.zero_grad()
    right = SLSIoULoss()(twin(batch[0], True)[1], batch[1], on_jax.WARM_EPOCH, on_jax.EPOCH)
    right.backward()
    optimizer.step()
    print(f"step {number}: loss {float(loss):.6f} by torchax, {right.item():.6f} eager")
    assert abs(float(loss) - right.item()) < (0.01 if TPU else 1e-3)

# %% [markdown]
# **What just happened.** The losses are the same, and the second and third contain the updates, so
# gradients and Adagrad are, too. (After many steps the two part. Adagrad's first update has the size of
# the learning rate however small the gradient is, and the bias of a convolution before batch norm has
# none at all: there rounding decides the sign.) The network object lent its code only: its own
# parameters are still the first ones.

# %% [markdown]
# ## For eight cores of a TPU, without one
#
# In lesson 09 torch_xla gave StableHLO away, and libtpu compiled it. JAX writes StableHLO, too, and
# needs no device for it: the mesh is an abstract one, of shapes and names. The batch is split over
# its eight cores, the state is held by each, and the program goes to the same compiler by the same
# way. It takes a minute or so: a whole network with its gradient.

# %%
from tpuscope import aot

side = np.zeros((16, 1, 32, 32), np.float32)
program = on_jax.stablehlo(step, 8, on_jax.initial_state(network), side, side)
report = aot.compile_program(program, "v5e:2x4", cores=8)
print(report.table(depth=1, rows=4))

assert report.fits and report.cores == 8
assert report.aliased_bytes > 0.9 * report.outputs_bytes  # the state takes the place of the old one
assert {found["kind"] for found in report.collectives} == {"all-reduce"}

# %% [markdown]
# **What just happened.** An estimate by the TPU's own compiler, not a run. The all-reduces are batch
# norm's statistics and the gradients: JAX's mesh and torch_xla's SPMD end in the same collectives.
# The state is updated in place, because it was donated. "Layers" are torchax's names of operations
# here, such as `aten::convolution`.

# %% [markdown]
# ## Exercise
#
# A network for targets likes to see every crop in its two mirrored forms. **Write `crop_flip`: crop
# and resize as before, and mirror left to right those images whose `flip` is 1, as data.** One program
# has to serve all boxes and all flips. (Mirroring everything by `torch.flip` is allowed; a decision in
# Python about a value is not.)


# %% tags=["exercise"]
def crop_flip(images, boxes, flip):
    """(B, C, H, W), boxes (B, 4), flip (B,) of 0 and 1, float32 → (B, C, 64, 64)."""
    return crop_resize(images, boxes)  # complete this


# %% tags=["check"]
# @title Check: run this cell to see whether you are right
from course import checking

with checking("One program, whatever is flipped.") as expect:
    jitted_flip = torchax.interop.jax_jit(crop_flip)
    few, few_boxes = images[:4], as_data(boxes[:4])
    plain = crop_resize(few, few_boxes).numpy()
    counts = []
    for flips in ([0, 1, 0, 1], [1, 1, 0, 0]):
        with env:
            before = on_jax.compilations()
            inputs = (tensor.to("jax") for tensor in (few, few_boxes, torch.tensor(flips).float()))
            result = jitted_flip(*inputs).numpy()
            counts.append(on_jax.compilations() - before)
        for number, flipped in enumerate(flips):
            right = plain[number, :, :, ::-1] if flipped else plain[number]
            expect(
                result[number].shape == right.shape and np.abs(result[number] - right).max() < 0.1,
                f"with flip {flips} image {number} should {'' if flipped else 'not '}be mirrored",
            )
    expect(counts[1] == 0, f"other flips compiled {counts[1]} programs more; make flip data")

# %% tags=["solution"]
# @title Solution (open after trying)


def crop_flip(images, boxes, flip):
    """Both forms are computed, and the flip chooses: where, not if."""
    crops = crop_resize(images, boxes)
    return torch.where(flip[:, None, None, None] > 0, torch.flip(crops, (3,)), crops)


with env:
    mirrored = torchax.interop.jax_jit(crop_flip)(
        on_device[:2], box_data[:2], torch.tensor([0.0, 1.0]).to("jax")
    )
print(tuple(mirrored.shape))

# %% [markdown] tags=["solution"]
# Or inside of the weights: mirroring a crop is reading its columns from right to left, so it is enough
# to mirror the matrix of columns, before the product.

# %% [markdown]
# ## Recap
#
# * `with torchax.default_env():` and `.to("jax")` run PyTorch on JAX; `torchax.interop.jax_jit` makes
#   one program of it.
# * A box as a slice is a program for each box; as data, in the weights of two matrix products, it is
#   one program for all. The box itself is found on the host.
# * On 0 to 255, float32 differs from OpenCV by about a hundredth of a grey level at most; bfloat16 by
#   half of one for the result, and more if it computes in bfloat16 as well.
# * The first call traces and compiles, later ones run; a batch laid over a mesh gives the same numbers.
# * torchax cannot decode files, and forgets batch norm's statistics: decode by PIL, and register
#   functions of your own.
# * A training step is a function of its state; exported, it compiles for `v5e:2x4` without a TPU.
#
# **Next:** lab 11, super-resolution.
