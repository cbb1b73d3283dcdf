"""One step as one program: traced on this process's XLA device, and not computed."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..engine import lazy_graph, metrics
from ..engine import torch_xla as runtime
from ..engine.lazy_graph import Program
from ..engine.tpu_specs import Topology
from ..errors import RequestError
from ..monitor import layers
from .compiler import CompilerFailed, compile_program, require_compiler
from .report import Report


class StepIsCut(RequestError):
    """The step is not one program: it reads a value, calls sync, or leaves nothing to compute."""

    def __init__(self, message: str, code: str = "step-is-cut"):
        super().__init__(message, code)


def estimate(
    step: Callable,
    inputs: tuple | list = (),
    topology: str = "v5e:1x1",
    effort: str = "fast",
    use_cache: bool = True,
    progress: bool | None = None,
    flags: dict[str, str] | None = None,
    compiler: str | None = None,
) -> Report:
    """Trace one step, and compile it for a TPU that need not be there.

    The step is traced on this process's XLA device, and not computed: like a real one it changes
    the parameters in place, but nothing runs before the next ``torch_xla.sync()``. The program is
    what that would compute and keep (new parameters, gradients, sums of the optimizer, results),
    so the step must not call it, nor read a value.

    State that the first step creates (an optimizer's momentum) is no argument of that step. To see
    the steps that come after it, run one real step before.

    Args:
        step: called with the inputs; forward, loss, backward, update. Its model is on the XLA
            device.
        inputs: its arguments; tensors in them, at any depth, are moved to the device.
        topology: see :func:`tpuscope.engine.tpu_specs.names`. The program is one core's, or, if
            this process has an SPMD mesh, that of as many cores.
        effort: see :func:`~tpuscope.aot.compile_program`, as for the following.
        use_cache: take an earlier answer.
        progress: show that the compiler is at work.
        flags: of the compiler.
        compiler: a Python that has jax and libtpu.

    Raises:
        StepIsCut: the step is more or less than one program.
        UnknownTopology: no such slice, or it has fewer cores.
        CompilerUnavailable: jax or libtpu is missing.
        CompilerTooOld: it does not know the slice.
        CompilerFailed: no answer.
    """
    slice_ = Topology.parse(topology)
    python = require_compiler(compiler, slice_).python
    program = trace(step, inputs)
    return compile_program(program, str(slice_), None, effort, use_cache, progress, flags, python)


def trace(step: Callable, inputs: tuple | list = ()) -> Program:
    """Return the program of one step, its operations labelled with their layers.

    The arguments are those of :func:`estimate`.

    Raises:
        StepIsCut: the step is more or less than one program.
    """
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(runtime.device()), list(inputs))
    runtime.wait()  # work that is still running would be counted as a part of the step
    executed = metrics.now().executions
    with _OneProgram() as traced:
        result = step(*inputs)
        # A result holds what autograd saved for it; a detached one does not.
        result = tree_map_only(Tensor, Tensor.detach, result)
    runtime.wait()  # a program is counted when it has run
    if metrics.now().executions > executed:
        raise StepIsCut(
            "the step ran a part of itself: it calls torch_xla.sync(), prints a tensor, or has an "
            "operation without lowering, which runs on the host (tpuscope.track names it)"
        )
    outputs = traced.pending()
    if not outputs:
        raise StepIsCut(
            "the step left nothing to compute: its model and inputs must be on the XLA device "
            "(tpuscope.engine.torch_xla.device())"
        )
    program = lazy_graph.lower(outputs)
    del result
    return program


class _OneProgram(layers.LayerLabels):
    """Labels operations, and stops a step before it reads a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _reads(function, args, kwargs or {}):
            raise StepIsCut(
                f"{self.current()} reads a value ({function}), which cuts the step in two; remove "
                "item(), cpu() and decisions that depend on values"
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


def _reads(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Return whether an operation reads from the XLA device."""
    if function is torch.ops.aten._local_scalar_dense.default:
        return args[0].device.type == "xla"
    if function is torch.ops.aten._to_copy.default:
        target = kwargs.get("device")
        return args[0].device.type == "xla" and target is not None and target.type != "xla"
    if function is torch.ops.aten.copy_.default:
        return args[1].device.type == "xla" and args[0].device.type != "xla"
    return False


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a new Python process.

    A process settles its number of XLA devices once, so a program for eight cores is traced in
    another process than one for a single core.

    Args:
        function: of a module that can be imported there.
        args: its arguments; they and the result are pickled.

    Raises:
        CompilerFailed: the process was killed.
        BaseException: what the function raises.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise CompilerFailed(
                "the process that traces the step was killed, as happens when memory runs out; "
                "use a smaller batch"
            ) from error
