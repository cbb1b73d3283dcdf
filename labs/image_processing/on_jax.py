"""torchax: an environment fixed for training, timed calls, and MSHNet's step as a JAX function."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.monitoring
import torch
import torchax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from torch import Tensor
from torch.nn import functional as F
from torchax.interop import jax_view
from torchax.ops.ops_registry import register_torch_function_op

from mshnet import MSHNet, SLSIoULoss
from tpuscope.figure import Picture

WARM_EPOCH, EPOCH = 5, 9  # of the loss: the phase after the warm-up


@functools.cache
def environment() -> Any:
    """Return torchax's environment, with two operations of torchax 0.0.13 replaced for training.

    * ``F.batch_norm`` leaves the running statistics as they were, without a word.
    * ``Tensor.amax``: see :func:`_amax`.
    """
    register_torch_function_op(F.batch_norm, _batch_norm, is_jax_function=False)
    register_torch_function_op(Tensor.amax, _amax)
    env = torchax.default_env()
    env.load_ops()  # again, where somebody has made the environment before
    return env


def _amax(x: jax.Array, dim: Sequence[int] | int, keepdim: bool = False) -> jax.Array:
    """Return ``x.amax(dim)`` with the gradient for one of the largest values, found by index.

    jax gives it to all values that equal the maximum, divided by their number. Where the compiler
    computes x twice, for the maximum and for the comparison, the two may differ by a rounding:
    none equals it then, and 0/0 is NaN. (jaxlib 0.7.2, XLA on the CPU with its optimiser off.)
    """
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    x = jnp.moveaxis(x, dims, range(-len(dims), 0))
    x = x.reshape(*x.shape[: -len(dims)], -1)
    chosen = jnp.arange(x.shape[-1]) == jnp.argmax(x, -1, keepdims=True)
    peak = jnp.where(chosen, x, 0).sum(-1)
    return jnp.expand_dims(peak, dims) if keepdim else peak


def _batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``F.batch_norm`` of (B, C, H, W) with an affine map, written out in PyTorch."""
    mean, variance = running_mean, running_var
    if training:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        count = x.numel() // x.shape[1]
        running_mean.lerp_(mean.detach(), momentum)
        running_var.lerp_(variance.detach() * (count / (count - 1)), momentum)
    scale = torch.rsqrt(variance + eps) * weight
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


@functools.cache
def _durations() -> Counter:
    """Return seconds and counts of jax's events since the first call, by name."""
    spent: Counter = Counter()

    def note(event: str, seconds: float, **_: Any) -> None:
        spent[event] += seconds
        spent[f"{event} count"] += 1

    jax.monitoring.register_event_duration_secs_listener(note)
    return spent


_TRACED = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
_COMPILED = "/jax/core/compile/backend_compile_duration"


def compilations() -> int:
    """Return the number of programs that jax compiled in this process since the first call."""
    return _durations()[f"{_COMPILED} count"]


class Run(NamedTuple):
    """Seconds of one call: all of it, and of that tracing (lowering included) and compiling."""

    seconds: float
    tracing: float
    compiling: float


def timed_runs(function: Callable, *inputs: Any, runs: int = 5) -> list[Run]:
    """Call a jitted function of torchax tensors several times; wait for each result and time it."""
    spent, found = _durations(), []
    for _ in range(runs):
        before, started = spent.copy(), time.perf_counter()
        jax.block_until_ready(jax_view(function(*inputs)))
        seconds = time.perf_counter() - started
        tracing = sum(spent[event] - before[event] for event in _TRACED)
        found.append(Run(seconds, tracing, spent[_COMPILED] - before[_COMPILED]))
    return found


def runs_picture(runs: Sequence[Run]) -> Picture:
    """Draw a bar for each run, on a logarithmic scale, with its milliseconds."""
    figure = Picture(figsize=(7, 2.8), dpi=90, layout="constrained")
    axis = figure.subplots()
    names = [f"run {number}" for number in range(1, len(runs) + 1)]
    milliseconds = [1e3 * run.seconds for run in runs]
    colours = ["#ff453a" if run.compiling else "#0a84ff" for run in runs]
    bars = axis.barh(names, milliseconds, color=colours)
    axis.bar_label(bars, [f"{value:,.1f} ms" for value in milliseconds], padding=4)
    axis.set(xscale="log", xlim=(min(milliseconds) / 3, 6 * max(milliseconds)))
    axis.set_xlabel("time of a call, ms (red: traced and compiled first)")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    return figure


class State(NamedTuple):
    """The state of a training step: dicts of jax arrays by name. ``squares`` is Adagrad's sum."""

    parameters: dict
    buffers: dict
    squares: dict


def initial_state(network: MSHNet) -> State:
    """Return the network's parameters and buffers, copied to jax's default device."""

    def copies(tensors: Any) -> dict:
        # A copy: jnp.asarray would share memory with the tensor that PyTorch goes on changing.
        return {name: jnp.array(tensor.detach().numpy()) for name, tensor in tensors}

    parameters = copies(network.named_parameters())
    squares = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    return State(parameters, copies(network.named_buffers()), squares)


def training_step(network: MSHNet, learning_rate: float = 0.05) -> Callable:
    """Return MSHNet's training step as one function of jax arrays: gradient and Adagrad update.

    The forward pass, the loss and the update are PyTorch, the gradient is ``jax.value_and_grad``.
    The network lends its code; its own parameters and buffers stay as they are.

    Returns:
        ``step(state, images, masks)`` → ``(state, loss)``; images and masks (B, 1, H, W) float32.
        Jit it, with the state donated.
    """
    environment()
    criterion = SLSIoULoss()

    def loss_of(parameters: dict, buffers: dict, images: Tensor, masks: Tensor) -> tuple:
        state = {**parameters, **buffers}
        _, logits = torch.func.functional_call(network, state, (images, True))
        return criterion(logits, masks, WARM_EPOCH, EPOCH), buffers  # buffers: changed in place

    def update(parameters: dict, squares: dict, gradients: dict) -> tuple[dict, dict]:
        squares = {name: squares[name] + gradients[name] ** 2 for name in squares}
        parameters = {
            name: parameters[name]
            - learning_rate * gradients[name] / (squares[name].sqrt() + 1e-10)
            for name in parameters
        }
        return parameters, squares

    gradient = jax.value_and_grad(jax_view(loss_of), has_aux=True)

    def step(state: State, images: Any, masks: Any) -> tuple:
        (loss, buffers), gradients = gradient(state.parameters, state.buffers, images, masks)
        parameters, squares = jax_view(update)(state.parameters, state.squares, gradients)
        return State(parameters, buffers, squares), loss

    return step


def stablehlo(step: Callable, cores: int, state: Any, *batch: Any) -> bytes:
    """Return a function of jax arrays as StableHLO for a TPU, the input of ``aot.compile_program``.

    Nothing is computed and no device is needed: the mesh is an abstract one.

    Args:
        step: called with the state and the batch; the state's memory goes to its results.
        cores: of the mesh; each holds all of the state, and its share of the batch's first axis.
        state: a tree of arrays, or of what has their shape and dtype.
        *batch: arrays whose first axis the cores share.

    Raises:
        ValueError: the cores cannot share the batch evenly.
    """
    mesh = AbstractMesh((cores,), ("batch",))

    def held(array: Any, *axes: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    for array in batch:
        if array.shape[0] % cores:
            raise ValueError(
                f"a batch of {array.shape[0]} does not divide over {cores} cores; take "
                f"{max(1, round(array.shape[0] / cores)) * cores}"
            )
    # aot's worker reads plain StableHLO: the older notation of shardings, without Shardy's dialect.
    newer = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        export = jax.export.export(jax.jit(step, donate_argnums=0), platforms=["tpu"])
        exported = export(jax.tree.map(held, state), *(held(array, "batch") for array in batch))
    finally:
        jax.config.update("jax_use_shardy_partitioner", newer)
    return exported.mlir_module_serialized
