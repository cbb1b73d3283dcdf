"""Which PyTorch calls a step makes, from which line, and which of them cost a trip to the host.

A ``TorchFunctionMode`` sees every call of PyTorch's Python interface, with its Python values, on
the way to torch_xla, and changes nothing of what is traced. (A ``TorchDispatchMode`` would see the
backward pass too, but under it torch_xla makes tensors without functionalization: in-place
operations on their views get lost, and other graphs come out. The text of the pending graph holds
no Python values, and its lines only under ``XLA_IR_DEBUG``.)
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ..engine import _private
from ..engine.lines import Line, caller
from ..engine.metrics import SCALAR_READ
from . import recompile_reasons
from .calls import Array, Call, Graph, special
from .recompile_reasons import Cause

# They only ask about a tensor, or change nothing that is traced.
_QUESTIONS = """
    __get__ __set__ __delete__ __hash__ __len__ dim ndimension size numel element_size stride
    storage_offset untyped_storage data_ptr device get_device has_names is_complex is_contiguous
    is_floating_point is_inference is_pinned register_hook requires_grad_ _set_grad_enabled
    _record_function_enter_new _record_function_exit._RecordFunction
    _has_compatible_shallow_copy_type
"""
_IGNORED = frozenset(_QUESTIONS.split())
# They bring values to the host, whatever they return.
_FETCHES = """
    item tolist cpu to numpy equal allclose is_nonzero __array__ __bool__ __float__ __int__
    __index__ __complex__ __contains__ __repr__ __str__ __format__ __reduce_ex__
"""
_READS = frozenset(_FETCHES.split())
_FEW = 5  # calls
_MAX_NODES = 16  # of the backward graph that one call is taken to have made


@dataclass(frozen=True)
class Event:
    """A call that ran something before the step's end, or fetched a value.

    Attributes:
        kind: ``"read"`` or ``"fallback"``.
        name: of the call, or of the operation that fell back.
        line: of the call; for an operation of the backward pass, of its forward call.
        backward: whether it was in a backward pass.
        cut: whether more than a few pending operations had to be run for it; a mean of what is
            computed already cuts no step.
        step: in which step, from 1.
    """

    kind: str
    name: str
    line: Line | None
    backward: bool
    cut: bool
    step: int


@dataclass(frozen=True)
class Compiled:
    """One or more programs that were compiled at the same point."""

    cause: Cause
    count: int
    step: int  # from 1
    trigger: str
    operation: str  # that fell back, or the call that read


@dataclass
class _Counted:
    uncached: int = 0
    cached: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Recorder(TorchFunctionMode):
    """Keeps the calls of the step that is being traced; see :class:`Graph`.

    Only the thread that opened it is seen, which is where a training step runs. What other
    threads upload appears as inputs.
    """

    def __init__(self, remember: int = 16):
        super().__init__()
        self.graphs: dict[int, Graph] = {}
        self.events: list[Event] = []
        self.compiled: list[Compiled] = []
        self.calls: list[Call] = []  # since the last sync
        self.step = 1
        self._signature = 0
        self._remembered: deque[Graph] = deque()
        self._remember = remember
        self._inputs: list[Array] = []
        self._origins: dict[int, str] = {}  # of this step's tensors, by torch_xla's id
        self._before: set[int] = set()  # ids of the step before
        self._floor: int | None = None  # tensors up to this id are older than the step
        self._newest = 0
        self._backward: dict[str, Counter[Line]] = {}
        # Arguments (call, line, label) whose number has changed without a compilation.
        self.harmless: set[tuple[str, Line | None, str]] = set()
        self._process = os.getpid()
        self._counted, self._reads = _count(), _reads()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        # A loader's workers are forked: they have this mode on, but no business with XLA.
        if name in _IGNORED or os.getpid() != self._process:
            return func(*args, **kwargs)
        given = list(_leaves(args, kwargs))
        on_device = any(_is_placed(leaf) for _, leaf in given)
        # Before the call: afterwards an argument that it changes in place is a result.
        arguments = self._describe(given) if on_device else ()
        if name in _READS:
            self._notice_unseen()
        result = func(*args, **kwargs)
        made = [leaf for _, leaf in _leaves((result,), {}) if isinstance(leaf, Tensor)]
        if on_device or any(map(_is_placed, made)):
            line = caller(sys._getframe(1))
            self._keep(name, line, given, arguments or self._describe(given), made)
        return result

    def _keep(
        self,
        name: str,
        line: Line | None,
        given: list[tuple[str, Any]],
        arguments: tuple[tuple[str, Any], ...],
        made: list[Tensor],
    ) -> None:
        """Take in a call that has to do with the device, after it.

        Args:
            name: of the function.
            line: that has called it.
            given: labels and arguments, containers opened.
            arguments: the same as they were before the call, described.
            made: tensors that it has returned.
        """
        tensors = [leaf for _, leaf in given if isinstance(leaf, Tensor)]
        from_device = [tensor for tensor in tensors if _is_placed(tensor)]
        placed = [tensor for tensor in made if _is_placed(tensor)]
        if name == "detach":  # another name for the same values, as for a checkpoint
            self._alias(tensors[0], placed[0])
            return
        self._keep_backward(tensors, placed, line)
        if from_device:
            self._mark(placed)
        else:
            self._mark_new(placed)
        if name.endswith("_"):  # in place: the tensors given are others now
            self._mark(from_device)
        fetched = bool(from_device) and not placed and name in _READS
        cut = self._notice(name, line, fetched)
        if cut or not fetched:  # what has run already is no part of this graph
            self._record(Call(name, line, arguments, tuple(_result(leaf) for leaf in made)))

    def __exit__(self, *error: Any) -> None:
        # PyTorch takes the innermost mode off its stack, whichever it is asked for; with watches
        # that are closed in another order that would be somebody else's.
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def end_step(self, line: Line | None, compiled: int) -> Graph:
        """A sync has run what was pending.

        Args:
            line: of the sync.
            compiled: programs that were new.
        """
        self._notice_unseen()
        graph = self._ran("sync", line, compiled)
        if self._floor is None or self._newest > self._floor:
            self._floor = self._newest
        self._before, self._origins = set(self._origins), {}
        self.calls, self._signature, self._inputs = [], 0, []
        self.step += 1
        self._counted = _count()
        return graph

    def _record(self, call: Call) -> None:
        self.calls.append(call)
        if call.is_upload:
            return
        essence = (call.name, tuple(_essence(leaf) for _, leaf in call.arguments), call.results)
        self._signature = hash((self._signature, essence))

    def _describe(self, given: list[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
        return tuple((label, self._leaf(leaf)) for label, leaf in given)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, _VALUES) else type(leaf).__name__
        shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
        if leaf.device.type == "xla":
            array = Array(shape, dtype, self._origin(leaf))
        elif leaf.device.type == "cpu":
            array = Array(shape, dtype, "host", None if shape else leaf.item())
        else:
            array = Array(shape, dtype, leaf.device.type)
        if array.origin in ("input", "host"):
            self._inputs.append(array)
        return array

    def _origin(self, tensor: Tensor) -> str:
        number = _private.tensor_id(tensor)
        if number in self._origins:
            return self._origins[number]
        origin = "kept" if number in self._before else self._new(tensor, number)
        self._origins[number] = "kept" if origin == "input" else origin  # an input is counted once
        return origin

    def _new(self, tensor: Tensor, number: int) -> str:
        """Origin of a tensor that no call has made or had before."""
        self._newest = max(self._newest, number)
        operation, value = _pending(tensor)
        if operation is None:
            return "input"
        if operation != _CONSTANT and self._floor is not None and number > self._floor:
            return "made"  # by the backward pass
        return f"pending {operation}" + (f" {value}" if value else "")

    def _mark(self, tensors: Iterator[Tensor] | list[Tensor]) -> None:
        """These were made in this step."""
        for tensor in tensors:
            number = _private.tensor_id(tensor)
            if self._floor is None:
                self._floor = number - 1
            self._origins[number] = "made"
            self._newest = max(self._newest, number)

    def _alias(self, tensor: Tensor, other: Tensor) -> None:
        """The other has the same origin."""
        origin = self._origin(tensor)
        number = _private.tensor_id(other)
        self._origins.setdefault(number, "kept" if origin == "input" else origin)

    def _mark_new(self, tensors: list[Tensor]) -> None:
        """These came from the host, or out of nothing."""
        made = []
        for tensor in tensors:
            operation, _ = _pending(tensor)
            if operation is None:
                self._origins[_private.tensor_id(tensor)] = "uploaded"
            elif operation != _CONSTANT:
                made.append(tensor)
        self._mark(made)

    def _keep_backward(self, given: list[Tensor], made: list[Tensor], line: Line | None) -> None:
        """Remember which line the nodes of the backward graph come from."""
        if line is None:
            return
        stop = {tensor.grad_fn for tensor in given}
        nodes = [tensor.grad_fn for tensor in made]
        for _ in range(_MAX_NODES):
            node = nodes.pop() if nodes else None
            if node is not None and node not in stop:
                stop.add(node)
                name = node.name().lower().rstrip("0123456789")
                self._backward.setdefault(name, Counter())[line] += 1
                nodes += [before for before, _ in node.next_functions]

    def _notice(self, name: str, line: Line | None, fetched: bool) -> bool:
        """What the last call has cost; whether it made pending operations run."""
        counted = _count()
        before, self._counted = self._counted, counted
        compiled = counted.uncached - before.uncached
        cut = counted.uncached + counted.cached > before.uncached + before.cached
        fallen = {
            operation: number - before.fallbacks.get(operation, 0)
            for operation, number in counted.fallbacks.items()
            if number > before.fallbacks.get(operation, 0)
        }
        backward = name in ("backward", "grad")
        for operation, number in fallen.items():
            lines = self._lines_of(operation, number) if backward else [line] * number
            for where in lines:
                self.events.append(Event("fallback", operation, where, backward, cut, self.step))
        if fetched:
            reads = _reads()
            for _ in range(reads - self._reads):
                of_a_step = cut and len(self.calls) > _FEW
                self.events.append(Event("read", name, line, False, of_a_step, self.step))
            self._reads = reads
        if cut:
            trigger = "fallback" if fallen else "read"
            where = self._lines_of(next(iter(fallen)), 1)[0] if fallen and backward else line
            self._ran(trigger, where, compiled, next(iter(fallen), name))
        return cut

    def _notice_unseen(self) -> None:
        """Reads that no call of PyTorch made: torch_xla's own, so nobody knows from which line."""
        reads = _reads()
        unseen = Event("read", "torch_xla", None, False, False, self.step)
        self.events += [unseen] * (reads - self._reads)
        self._reads = reads

    def _lines_of(self, operation: str, number: int) -> list[Line | None]:
        """Where the forward calls of a backward operation are, as often as it ran."""
        key = operation.replace("_", "")
        forward = self._backward.get(key) or self._backward.get(f"{key}backward")
        if not forward:
            return [None] * number
        total = sum(forward.values())
        lines: list[Line | None] = []
        for at, n in forward.items():
            lines += [at] * max(1, n * number // total)
        return (lines + lines[-1:] * number)[:number]

    def _ran(self, trigger: str, line: Line | None, compiled: int, name: str = "") -> Graph:
        """The calls up to here have been run as a program."""
        signature = hash((trigger, self._signature))
        calls, inputs = tuple(self.calls), tuple(self._inputs)
        graph = self.graphs.get(signature)
        if compiled:
            new = Graph(signature, trigger, line, calls, inputs, self.step)
            cause = recompile_reasons.find(new, self._remembered, self.harmless, name)
            self.compiled.append(Compiled(cause, compiled, self.step, trigger, name))
        elif graph and graph.calls is not None:
            self.harmless |= _changed_numbers(graph.calls, calls)
        if graph is None:
            graph = self.graphs[signature] = Graph(signature, trigger, line, calls, (), self.step)
            self._remembered.append(graph)
            if len(self._remembered) > self._remember:
                self._remembered.popleft().calls = None
        elif graph.calls is not None:
            graph.calls = calls
        if not graph.runs or len(inputs) < len(graph.inputs):
            graph.inputs = inputs  # in its first step a graph also meets the model's own tensors
        graph.runs += 1
        graph.compiled += compiled
        return graph


def _is_placed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "xla"


def _changed_numbers(old: tuple[Call, ...], new: tuple[Call, ...]) -> set:
    a_calls, b_calls = ([c for c in calls if not c.is_upload] for calls in (old, new))
    return {
        (b.name, b.line, label)
        for a, b in zip(a_calls, b_calls, strict=True)
        for (_, was), (label, is_now) in zip(a.arguments, b.arguments, strict=True)
        if isinstance(was, float) and was != is_now
    }


_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


_DATA = ("kept", "input", "uploaded", "host")


def _essence(leaf: Any) -> Any:
    """What of an argument is part of the graph; most numbers are passed as data, 0 and 1 are not.

    Some operations make every number a part of their graph: see causes.find.
    """
    if isinstance(leaf, Array):
        origin = "data" if leaf.origin in _DATA else leaf.origin
        return (leaf.shape, leaf.dtype, origin, special(leaf.value))
    return special(leaf) if isinstance(leaf, float) else (type(leaf), leaf)


def _leaves(args: tuple, kwargs: dict, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Arguments with their labels, containers opened."""
    for label, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size) and depth < 3:
            for inner, leaf in _leaves(tuple(value), {}, depth + 1):
                yield f"{label}.{inner}", leaf
        elif isinstance(value, dict) and depth < 3:
            for inner, leaf in _leaves((), value, depth + 1):
                yield f"{label}.{inner}", leaf
        elif isinstance(value, slice):
            for inner, leaf in zip(("start", "stop", "step"), _slice(value)):
                yield f"{label}.{inner}", leaf
        else:
            yield str(label), value


def _slice(value: slice) -> tuple:
    return value.start, value.stop, value.step


_CONSTANT = "prim::Constant"


def _pending(tensor: Tensor) -> tuple[str | None, str]:
    """The operation that would give a tensor's values, and its value if it is a constant.

    The operation is None where the values are on the device already.
    """
    about = _private.debug_info(tensor)
    pending = about.partition("IR: ")[2].partition("\n")[0]
    operation = pending.partition("] ")[2].partition(",")[0]
    if operation in ("", "xla::device_data"):
        return None, ""
    return operation, pending.partition("value=")[2]


def _result(tensor: Tensor) -> tuple:
    shape = tuple(tensor.shape)
    return (
        shape,
        str(tensor.dtype).removeprefix("torch."),
        tensor.device.type,
        tensor.requires_grad,
    )


def _count() -> _Counted:
    import torch_xla.debug.metrics as met

    return _Counted(
        met.counter_value("UncachedCompile") or 0,
        met.counter_value("CachedCompile") or 0,
        {
            name.removeprefix("aten::"): met.counter_value(name)
            for name in met.executed_fallback_ops()
            if name != SCALAR_READ
        },
    )


def _reads() -> int:
    """Reads so far, as :attr:`counts.Counts.host_reads` counts them."""
    import torch_xla.debug.metrics as met

    data = met.metric_data("TransferFromDeviceTime")
    inputs = met.counter_value("xla::_to_cpu") or 0
    scalars = met.counter_value(SCALAR_READ) or 0
    return scalars + max(0, (data[0] if data else 0) - inputs)
