"""Steps as one program on eager engines: ``step = FxStep(step, state)``.

TorchTPU, CUDA and CPUs run PyTorch operation by operation. ``torch.compile`` makes two programs of
a training step, forward and backward, and leaves the optimizer outside. Here the whole step
(forward pass, loss, backward pass, update, batch norm's statistics) is traced once into one FX
graph, by ``make_fx`` over fake tensors, so that nothing is computed; the graph is made functional
and handed to a backend of ``torch.compile``. On TorchTPU that is one program a step.

The step is an ordinary function that changes its state in place; it need not know of this.
:class:`~tpuscope.engine.compiled_step.CompiledStep` does the same for torch_xla's lazy tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .host_values import HostValues, host_random_state, modes
from .lines import Line, is_library

_KEPT = 8  # programs of one batch shape, for different Python values
_FEW = 3  # changes in a row that get a program of their own


class FxStep:
    """A step that runs as one program from its first call on.

    Losses, weights and optimizer state are those of the step itself, but for the rounding of the
    backend that compiles it. The second call traces the step again, to check that it is the first
    one. Where one program would not be the step, the step runs as it is, operation by operation:

    * It reads a value of a tensor on the device, draws random numbers on the host, reads tensors
      that are neither state nor arguments, leaves gradients behind, or calls an operation with
      another number each time (Adam's bias correction; ``capturable=True`` computes it on the
      device).
    * A Python value that it reads changes in every call. One that changes sometimes, such as a
      learning rate, gets a program of its own; 8 are kept.

    Args:
        step: from tensors to a tuple of tensors, all on one device. It may change the state in
            place. Its results are returned without gradients' history: detach them.
        state: tensors on the device that the step reads or changes beside its arguments:
            parameters, buffers, the optimizer's sums. They must exist before the first call.
        counted: tensors on the host that a step may raise: an optimizer's count of steps.
        optimizers: those whose ``param_groups`` the step reads; optimizers that the code of the
            step names are found without it.
        backend: of ``torch.compile``: ``"tpu"`` (TorchTPU), ``"inductor"``, or ``"eager"``, which
            runs the graph as it is.

    Attributes:
        fallback_reason: why the last call ran operation by operation, with the line of the step
            where that is known; None if it ran as a program.
        compilations: programs made so far.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        state: Iterable[Tensor],
        counted: Iterable[Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
        backend: str = "tpu",
    ):
        self.fallback_reason: str | None = None
        self.compilations = 0
        self._refused = False  # fallback_reason holds for all calls
        self._step = step
        self._state = list(state)
        self._counted = list(counted)
        self._optimizers = tuple(optimizers)
        self._backend = backend
        self._programs: dict[tuple, list[_Program]] = {}  # by shapes and modes, the newest last
        self._changes = 0  # calls in a row with values that no program has

    def __call__(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Run one step; return its results."""
        if self._refused:
            return self._step(*batch)
        device = batch[0].device.type if batch else "cpu"
        key = (modes(device), *((t.shape, t.dtype, t.requires_grad) for t in batch))
        programs = self._programs.setdefault(key, [])
        program = next((p for p in reversed(programs) if p.fits(self._state)), None)
        if program is None and programs:
            self._changes += 1
            if self._changes > _FEW:
                return self._refuse(
                    "the step reads a value that changes in every call: "
                    f"{programs[-1].difference(self._state)}",
                    batch,
                )
        elif program is not None and program.seen_twice:
            self._changes = 0
        if program is None or not program.seen_twice:
            try:
                again = _Trace(self._step, self._state, self._counted, batch)
            except _NotOneProgram as error:
                return self._refuse(str(error), batch)
            if program is None:
                program = self._compile(again, batch)
                programs.append(program)
                del programs[:-_KEPT]
            elif difference := program.trace.unlike(again):
                return self._refuse(difference, batch)
            else:
                program.seen_twice = True
        self.fallback_reason = None
        return program.run(self._state, batch)

    def _refuse(self, reason: str, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.fallback_reason, self._refused = reason, True
        self._programs.clear()
        return self._step(*batch)

    def _compile(self, trace: "_Trace", batch: tuple[Tensor, ...]) -> "_Program":
        values = HostValues(self._step, self._optimizers, self._state, self._counted)
        self.compilations += 1
        return _Program(trace, self._state, batch, values, self._backend)


def _decompositions() -> dict:
    """Return how batch norm is written in operations that say what they change.

    ``native_batch_norm`` updates its running statistics, and its schema does not say so: a
    functional graph loses them, and so does TorchTPU 0.2.0.
    """
    aten = torch.ops.aten
    return get_decompositions([aten.native_batch_norm, aten.cudnn_batch_norm])


class _NotOneProgram(Exception):
    """A step cannot be one program; the message says why, with the line."""


class _HostArithmetic(TorchDispatchMode):
    """Computes with host tensors while the device's are traced: counts of steps, constants.

    Args:
        inputs: what is traced, wherever it is.
    """

    def __init__(self, inputs: Iterable[Tensor]):
        super().__init__()
        self._inputs = {id(tensor) for tensor in inputs}
        self.made: dict[int, Tensor] = {}  # kept alive: an id stays its tensor's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not tensors or not all(map(self._is_of_the_host, tensors)):
            return func(*args, **kwargs or {})
        with _disable_current_modes():
            result = func(*args, **kwargs or {})
        self.made |= {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result

    def _is_of_the_host(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == "cpu"
            and not isinstance(tensor, FakeTensor)
            and id(tensor) not in self._inputs
        )


class _FakeMode(FakeTensorMode):
    """Answers with fake tensors also where all arguments are real: torch's mode computes then."""

    def dispatch(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs or {}))
        return super().dispatch(func, types, args, kwargs)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)


class _Trace:
    """The operations of one step on its state and batch; nothing is computed or changed.

    Attributes:
        graph: takes state and batch, returns the step's results; changes its inputs in place.
        counted: host tensors that the step raises, and by how much.

    Raises:
        _NotOneProgram: the step needs values, or reads or leaves something else.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        state: list[Tensor],
        counted: list[Tensor],
        batch: tuple[Tensor, ...],
    ):
        before = [t.clone() for t in counted]
        gradients = [t.grad if t.requires_grad else None for t in state]
        host = host_random_state()
        # The step works on its own tensors, whose operations are seen because they are the
        # tracer's inputs. The mode below answers with fake tensors, so no value changes.
        arithmetic = _HostArithmetic([*state, *batch])
        results: tuple[Tensor, ...] = ()

        def traced(*_: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            with arithmetic:
                results = tuple(step(*batch))
            return results

        try:
            with _FakeMode(allow_non_fake_inputs=True):
                self.graph = make_fx(
                    traced, decomposition_table=_decompositions(), tracing_mode="real"
                )(*state, *batch)
        except Exception as error:
            # Whatever the step's own fault may be: it is run as it is, and raises it again.
            raise _NotOneProgram(_first_line(error) + _at(_line_of(error.__traceback__))) from error
        finally:
            self.counted = [
                (t, t - old)
                for t, old in zip(counted, before, strict=True)
                if not torch.equal(t, old)
            ]
            for tensor, old in zip(counted, before, strict=True):
                tensor.copy_(old)
            left = [t for t, g in zip(state, gradients, strict=True) if t.requires_grad]
            left = [t for t in left if isinstance(t.grad, FakeTensor)]
            for tensor, gradient in zip(state, gradients, strict=True):
                if tensor.requires_grad:
                    tensor.grad = gradient
        if left:
            raise _NotOneProgram(
                f"the step leaves {len(left)} gradients behind: end it with "
                "optimizer.zero_grad(set_to_none=True)"
            )
        if host != host_random_state():
            raise _NotOneProgram("the step draws random numbers on the host")
        if any(t.requires_grad for t in results):
            raise _NotOneProgram("the step returns a tensor that requires grad: detach it")
        self._constants = self._require_known(arithmetic.made)
        for node in list(self.graph.graph.nodes)[::-1]:  # of the profiler; they compute nothing
            if "_record_function" in str(node.target):
                self.graph.graph.erase_node(node)
        self.graph.recompile()
        self._calls = [
            (str(node.target), repr(node.args), repr(node.kwargs))
            for node in self.graph.graph.nodes
        ]

    def _require_known(self, made: dict[int, Tensor]) -> list[Tensor]:
        """Return the constants that the step makes itself."""
        constants, strangers = [], []
        for node in self.graph.graph.find_nodes(op="get_attr"):
            value = getattr(self.graph, str(node.target))
            if isinstance(value, Tensor):
                known = id(value) in made or (value.device.type == "cpu" and value.dim() == 0)
                (constants if known else strangers).append(value)
        if strangers:
            shapes = ", ".join(str(tuple(t.shape)) for t in strangers[:3])
            raise _NotOneProgram(
                f"the step reads {len(strangers)} tensors of shape {shapes}, neither state nor "
                "arguments"
            )
        return constants

    def unlike(self, later: "_Trace") -> str | None:
        """Return what differs from the step before, or None."""
        for old, new in zip(self._calls, later._calls, strict=False):
            if old != new:
                what = "numbers differ" if old[0] == new[0] else "operations differ"
                return f"the {what} from those of the step before: {old[0]} {old[1]}, then {new[1]}"
        if len(self._calls) != len(later._calls):
            return "a step has more operations than the other"
        pairs = list(zip(self._constants, later._constants, strict=True))
        if not all(torch.equal(old, new) for old, new in pairs):
            return "a constant of the step differs from that of the step before"
        raised = [[(id(t), float(by)) for t, by in trace.counted] for trace in (self, later)]
        return None if raised[0] == raised[1] else "the counts that a step raises differ"


class _Program:
    """A compiled step.

    Attributes:
        trace: what was compiled.
        seen_twice: whether two steps with the same values were the same.
    """

    def __init__(
        self,
        trace: _Trace,
        state: list[Tensor],
        batch: tuple[Tensor, ...],
        values: HostValues,
        backend: str,
    ):
        self.trace = trace
        self.seen_twice = False
        self._values = values
        self._facts = _facts(state)
        count = len(state)

        def functional(*inputs: Tensor) -> tuple[Tensor, ...]:
            return (*trace.graph(*inputs), *inputs[:count])

        inputs = [t.detach() for t in (*state, *batch)]
        with torch.no_grad():
            # Constants that the step makes are real tensors among the fake ones.
            graph = make_fx(
                torch.func.functionalize(functional),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*inputs)
            outputs = _keep_computed(graph)
            compile_graph: Any = torch._dynamo.lookup_backend(backend)
            self._run = compile_graph(graph, inputs)
        self._results, values_of_state = outputs[: len(outputs) - count], outputs[-count:]
        self._changed = [
            (i, place) for i, place in enumerate(values_of_state) if place != _Given(i) and count
        ]

    def fits(self, state: list[Tensor]) -> bool:
        """Return whether the step with the present Python values is this program."""
        return self.difference(state) is None

    def difference(self, state: list[Tensor]) -> str | None:
        """Return what has changed since it was traced, or None."""
        change = self._values.change()
        if change is None and _facts(state) != self._facts:
            change = "shape, dtype or requires_grad of a tensor of the state"
        return change

    def run(self, state: list[Tensor], batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run it; the state's tensors hold the new values then."""
        inputs = [t.detach() for t in (*state, *batch)]
        with torch.no_grad():
            computed = self._run(*inputs)
        for tensor, raised in self.trace.counted:
            tensor += raised
        results = tuple(_at_place(place, computed, inputs) for place in self._results)
        for position, place in self._changed:
            state[position].data = _at_place(place, computed, inputs)
        return results


class _Given(NamedTuple):
    """An output of a graph that is one of its inputs."""

    position: int


def _keep_computed(graph: fx.GraphModule) -> list[int | _Given]:
    """Reduce a graph's outputs to those that it computes.

    Returns:
        For each output its position among those, or the input that it is.
    """
    inputs = {node: _Given(i) for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    [output] = graph.graph.find_nodes(op="output")
    nodes: Any = output.args[0]
    computed = list(dict.fromkeys(node for node in nodes if node not in inputs))
    output.args = (tuple(computed),)
    for node in list(graph.graph.nodes)[::-1]:  # what functionalize() writes back: we do that
        if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    position = {node: i for i, node in enumerate(computed)}
    return [inputs[node] if node in inputs else position[node] for node in nodes]


def _at_place(place: int | _Given, computed: Sequence[Tensor], inputs: list[Tensor]) -> Tensor:
    return inputs[place.position] if isinstance(place, _Given) else computed[place]


def _facts(state: list[Tensor]) -> list[tuple]:
    """Return what a program takes for granted about the state's tensors, beside their values."""
    return [(t.shape, t.dtype, t.requires_grad) for t in state]


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].strip()
    if isinstance(error, DataDependentOutputException):
        return f"the step reads a value of a tensor: {error.func}"
    return text or type(error).__name__


def _line_of(trace: TracebackType | None) -> Line | None:
    """Return the innermost line of the user's code in a traceback."""
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_library(file):
            found = Line(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _at(line: Line | None) -> str:
    return f" ({line.quoted()})" if line else ""
