"""Steps that are traced twice and then repeated: ``step = CompiledStep(step, state)``.

torch_xla traces a step whenever it runs, operation by operation, and then finds the program in its
cache. For a step of a few thousand operations that takes the host a tenth of a second, whatever the
batch; a TPU that computes the step in less waits for the rest. Here the first two steps are traced,
the second to check that it is the first again. After them the compiled program is called with the
present state, the next batch and the next random seed.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from . import _private, lazy_graph
from . import torch_xla as runtime
from .host_values import HostValues, host_random_state, modes
from .lines import Line, caller

_KEPT = 8  # programs of one batch shape, for different Python values
_FEW = 3  # changes in a row that are traced for a program of their own
_TRACES = 4  # after which the program has to be the one of the step before


class CompiledStep:
    """A step on the XLA device that costs the host next to nothing after its second call.

    Losses, weights and optimizer state equal to the bit those of ``step(*batch)`` followed by
    ``torch_xla.sync()``. Whenever a repeated program would not give them, the step is traced:

    * Random numbers on the device (Dropout) are new in every call.
    * A Python value that the step reads has changed: a learning rate, a beta, a module's
      ``training``, a closure's variable (:class:`tpuscope.engine.host_values.HostValues` says which
      are noticed). The new value costs two traced steps; up to 8 programs are kept, so a value that
      comes back costs nothing. A value that changes in every call is traced in every call. Hand it
      over as a tensor of one dimension to have such a step repeated.
    * A step that cannot be repeated, because it reads a value of a tensor, draws random numbers on
      the host, changes Python values or tensors that are neither state nor results, or calls an
      operation with another number each time (Adam's bias correction; ``capturable=True`` computes
      it on the device), is traced in every call.

    Not noticed: what :class:`~tpuscope.engine.host_values.HostValues` does not notice.

    Args:
        step: from tensors to a tuple of tensors, all on the device. It may change the state in
            place; it must not call ``torch_xla.sync()``. Its results are returned without
            gradients' history: detach them.
        state: tensors on the device that the step reads or changes, beside its arguments:
            parameters, buffers, gradients that outlive the step, the optimizer's sums. They must
            exist before the first call.
        counted: tensors on the host that a step may raise: an optimizer's count of steps.
        optimizers: those whose ``param_groups`` the step reads; optimizers that the code of the
            step names are found without it.

    Attributes:
        fallback_reason: why the last call was traced although two calls like it were traced
            before; it names the line of the step where that is known. None otherwise.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        state: Iterable[Tensor],
        counted: Iterable[Tensor] = (),
        optimizers: Iterable[Optimizer] = (),
    ):
        self.fallback_reason: str | None = None
        self._refused = False  # fallback_reason holds for all calls
        self._step = step
        self._state = list(state)
        self._counted = list(counted)
        self._optimizers = tuple(optimizers)
        self._programs: dict[tuple, list[_Program]] = {}  # by shapes and modes, the newest last
        self._latest: HostValues | None = None  # while values change in every call
        self._changes = 0  # calls in a row with values that no program has

    def __call__(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """Dispatch one step; nothing is left to be computed by the next ``torch_xla.sync()``."""
        if self._refused:
            return self._traced_only(batch)
        key = (modes("xla"), *((t.shape, t.dtype, t.requires_grad) for t in batch))
        programs = self._programs.setdefault(key, [])
        program = next((p for p in reversed(programs) if p.fits(self._state, batch)), None)
        if program is None and programs and self._keeps_changing(programs[-1], batch):
            return self._traced_only(batch)
        self.fallback_reason = None
        if program is None or not program.seen_twice:
            return self._trace(programs, program, batch)
        self._changes, self._latest = 0, None
        seed = self._settle(batch)
        for tensor, raised in program.counted:
            tensor += raised
        results = program.run(self._state, batch)
        _continue_from(seed)
        return results

    def _keeps_changing(self, program: "_Program", batch: tuple[Tensor, ...]) -> bool:
        """Return whether values change in every call, so that a program of their own is no use."""
        self._changes += 1
        before, self._latest = self._latest, None
        if self._changes <= _FEW:
            return False
        change = before.change() if before else program.difference(self._state, batch)
        if change is None:
            return False  # they have settled
        self._latest = self._values()
        self.fallback_reason = f"the step reads a value that changes in every call: {change}"
        return True

    @staticmethod
    def _own_change(before: "_Program | None") -> str | None:
        """Return which Python value the step itself changes, which a program would not."""
        change = before.values.change() if before else None
        return f"the step changes a Python value: {change}" if change else None

    def _values(self) -> HostValues:
        return HostValues(self._step, self._optimizers, self._state, self._counted)

    def _settle(self, batch: tuple[Tensor, ...]) -> int | None:
        """Compute what a program will read: it takes values, and nothing that is pending.

        Returns:
            The random seed for after the step, None if it is the usual one. A sync advances the
            seed, and tracing would have had one sync for all.
        """
        if any(_private.are_pending([*self._state, *batch])):
            return _sync_within_step()
        return None

    def _traced_only(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = self._step(*batch)
        runtime.sync()
        return results

    def _trace(
        self,
        programs: list["_Program"],
        before: "_Program | None",
        batch: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Trace a step, keep its program, and run it.

        Args:
            programs: where it is kept.
            before: the program of the step with the same values before, if there was one.
            batch: the step's arguments.
        """
        seed = _sync_within_step()  # what is pending now is no part of the step
        inputs = _Inputs(self._state, batch)
        counted = [t.clone() for t in self._counted]
        host = host_random_state()
        with _Calls() as calls:
            results = self._step(*batch)
        program = _Program(self._state, batch, results, inputs, calls)
        program.traces = before.traces + 1 if before else 1
        self.fallback_reason = (
            calls.fault
            or ("the step draws random numbers on the host" if host != host_random_state() else "")
            or program.fault()
            or self._own_change(before)
            or program.unlike(before)
            or None
        )
        if self.fallback_reason:
            self._refused = True
            runtime.sync()
            _continue_from(seed)
            return results
        # Warm-up leaves out heads, and the optimizer does not count their steps.
        pairs = zip(self._counted, counted, strict=True)
        program.counted = [(t, t - old) for t, old in pairs if not torch.equal(t, old)]
        program.compile()
        program.values = self._values()
        program.seen_twice = before is not None and before.same_as(program)
        if before:
            programs.remove(before)
        programs.append(program)
        del programs[:-_KEPT]
        del results  # or the next sync would compute them
        made = program.run(self._state, batch)
        _continue_from(seed)
        return made


def _sync_within_step() -> int:
    """Sync, but let random numbers continue as if nothing had been cut here.

    Returns:
        The random seed for after the step, see :func:`_continue_from`.
    """
    running = runtime.rng_state()
    runtime.sync()
    after = runtime.rng_state()
    runtime.set_rng_state(running)
    return after


def _continue_from(seed: int | None) -> None:
    if seed is not None:
        runtime.set_rng_state(seed)


def _ran() -> tuple[int, ...]:
    """Count what can end or cut a step: programs asked for, syncs, fallbacks, reads."""
    import torch_xla.debug.metrics as met

    names = ("CachedCompile", "UncachedCompile", "MarkStep", *met.executed_fallback_ops())
    read = met.metric_data("TransferFromDeviceTime")
    return read[0] if read else 0, *(met.counter_value(name) or 0 for name in names)


def _first_difference(
    before: list["_Call"], now: list["_Call"]
) -> tuple["_Call | None", "_Call | None"] | None:
    for old, new in zip(before, now, strict=False):
        if (old.name, old.numbers) != (new.name, new.numbers):
            return old, new
    if len(before) == len(now):
        return None
    longer = max(before, now, key=len)[min(len(before), len(now))]
    return (longer, None) if len(before) > len(now) else (None, longer)


class _Call(NamedTuple):
    name: str
    numbers: tuple
    line: Line | None


class _Calls(TorchFunctionMode):
    """Sees the calls of a step, the numbers that they get, and what runs before the step's end.

    The backward pass is one call.

    Attributes:
        seen: calls in order.
        fault: what ran before the step's end, with its line; empty if nothing did.
    """

    def __init__(self):
        super().__init__()
        self.seen: list[_Call] = []
        self.fault = ""
        self._read: dict[str, Line | None] = {}  # first use of a value, by its id
        self._made: list[tuple[Any, Line | None]] = []  # weak references to results
        self._ran = _ran()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        line = caller(sys._getframe(1))
        leaves = tree_leaves((args, kwargs))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, (bool, int, float, complex)))
        self.seen.append(_Call(name, numbers, line))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type == "xla":
                self._read.setdefault(_private.value_id(leaf), line)
        result = function(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "xla":
                self._made.append((TensorWeakRef(leaf), line))
        self._notice(name, line)
        return result

    def __exit__(self, *error):
        self._notice("a call of torch_xla", None)
        return super().__exit__(*error)

    def _notice(self, name: str, line: Line | None) -> None:
        before, self._ran = self._ran, _ran()
        if self._ran != before and not self.fault:
            self.fault = (
                "a part of the step ran while it was traced: a value was read, the step called "
                f"torch_xla.sync(), or an operation without lowering ran on the host: {name}"
                + _at(line)
            )

    def forget(self) -> None:
        """Keep the calls only, and no references to what they have made."""
        self._made.clear()
        self._read.clear()

    def reader(self, value: Tensor) -> Line | None:
        """Return the line that used a value first."""
        return self._read.get(_private.value_id(value))

    def maker(self, known: set[str]) -> Line | None:
        """Return the line of the first result that is still pending, except for known values."""
        for reference, line in self._made:
            tensor = reference()
            if tensor is None or not _private.are_pending([tensor])[0]:
                continue
            if _private.value_id(tensor) not in known:
                return line
        return None


class _Inputs:
    """What a step may read, before it is traced.

    Attributes:
        places: (0, position in the state) or (1, position in the batch), by the numbers under which
            a program may know it.
        values: ids of the tensors' values.
        shared: places of inputs that hold one and the same value: a program has them once.
        newest: number of the newest tensor.
    """

    def __init__(self, state: list[Tensor], batch: tuple[Tensor, ...]):
        self.places: dict[int, tuple[int, int]] = {}
        by_value: dict[str, list[tuple[int, int]]] = {}
        for kind, tensors in enumerate((state, batch)):
            for position, tensor in enumerate(tensors):
                # Another number where the value was moved from one tensor to another.
                numbers, _ = _private.program_inputs([tensor])
                place = kind, position
                self.places |= dict.fromkeys([_private.tensor_id(tensor), *numbers], place)
                by_value.setdefault(_private.value_id(tensor), []).append(place)
        self.places.pop(_NUMBER, None)
        self.values = {value: places[0] for value, places in by_value.items()}
        self.shared = [places for places in by_value.values() if len(places) > 1]
        self.newest = lazy_graph.newest_tensor()


_NUMBER = -1  # of a Python number among a program's inputs


class _Program:
    """What a traced step reads and leaves, by its place in state, batch and results.

    Args:
        state: after the step was traced.
        batch: what it was traced with.
        results: what it returned.
        inputs: state and batch before the step.
        calls: of the traced step.

    Attributes:
        counted: host tensors that each run raises, and by how much.
        seen_twice: whether two steps with the same values were the same.
        traces: how often a step with these values was traced.
        values: Python values that the step can read.
    """

    values: HostValues

    def __init__(
        self,
        state: list[Tensor],
        batch: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        inputs: _Inputs,
        calls: _Calls,
    ):
        self.counted: list[tuple[Tensor, Tensor]] = []
        self.seen_twice = False
        self.traces = 1
        self._inputs, self._calls = inputs, calls
        self._tensors = _facts(state)
        self._results = results
        self._changed = [i for i, waits in enumerate(_private.are_pending(state)) if waits]
        # torch_xla gives equal results once, and none for what it was given.
        self._leaves: list[Tensor] = []
        positions: dict[str, int] = {}  # of the leaves, by their values
        self._outputs: list[tuple[int, int] | int | None] = []  # of state and results
        pending = _private.are_pending(list(results))
        changed = [(state[i], True) for i in self._changed]
        for tensor, waits in [*changed, *zip(results, pending, strict=True)]:
            value = _private.value_id(tensor)
            if not waits:
                given = next(((1, i) for i, t in enumerate(batch) if t is tensor), None)
                self._outputs.append(given or inputs.values.get(value))
            else:
                if value not in positions:
                    positions[value] = len(self._leaves)
                    self._leaves.append(tensor)
                self._outputs.append(positions[value])
        self._known = set(positions)
        numbers, self._values = _private.program_inputs(self._leaves)
        self._sources = [inputs.places.get(number) for number in numbers]
        seed = _private.seed_id()
        self._seeds = [i for i, number in enumerate(numbers) if number == seed]
        self._constants = {
            i: _private.value_id(value)
            for i, (value, source) in enumerate(zip(self._values, self._sources, strict=True))
            if source is None and i not in self._seeds
        }
        self._made_inside = {
            i for i in self._constants if numbers[i] == _NUMBER or numbers[i] > inputs.newest
        }

    def fits(self, state: list[Tensor], batch: tuple[Tensor, ...]) -> bool:
        """Return whether the step with the present values is this program."""
        return self.difference(state, batch) is None

    def difference(self, state: list[Tensor], batch: tuple[Tensor, ...]) -> str | None:
        """Return what is different from when the step was traced, or None."""
        change = self.values.change()
        if change is None and _facts(state) != self._tensors:
            change = "dtype, requires_grad or .grad of a tensor of the state"
        if change is None:
            given = state, batch
            for places in self._inputs.shared:
                if len({_private.value_id(given[kind][i]) for kind, i in places}) > 1:
                    return "which tensors are the same"
        return change

    def fault(self) -> str | None:
        """Return why the program cannot be repeated, or None; before :meth:`compile`."""
        strangers = [self._values[i] for i in self._constants if i not in self._made_inside]
        strangers += [self._values[i] for i in self._made_inside if self._values[i].dim() > 0]
        if strangers:
            shapes = [tuple(value.shape) for value in strangers]
            return f"the step reads {_some(shapes)}, neither state nor arguments" + _at(
                self._calls.reader(strangers[0])
            )
        if None in self._outputs:
            return "the step returns a tensor that is neither computed nor state nor argument"
        if any(t.requires_grad for t in self._results):
            return "the step returns a tensor that requires grad: detach it"
        left = lazy_graph.live_pending(self._leaves)
        if left:
            return f"the step leaves {_some(left)}, neither state nor results" + _at(
                self._calls.maker(self._known)
            )
        return None

    def unlike(self, before: "_Program | None") -> str | None:
        """Return what differs from a step with the same values before, or None."""
        if before is None:
            return None
        different = _first_difference(before._calls.seen, self._calls.seen)
        if different is not None:
            old, new = different
            if old and new and old.name == new.name:
                return (
                    f"the numbers of a step differ from those of the step before: {old.numbers}, "
                    f"then {new.numbers} in {new.name}{_at(new.line)}"
                )
            call = new or old
            assert call is not None
            return f"a step makes other calls than the step before: {call.name}{_at(call.line)}"
        if self.traces > _TRACES:
            return "the program of the step is another one in every call"
        return None

    def same_as(self, other: "_Program") -> bool:
        """Return whether both compute the same; after :meth:`compile`."""
        raised = [(id(t), float(n)) for t, n in self.counted]
        return (
            self._hash == other._hash
            and self._constants == other._constants
            and raised == [(id(t), float(n)) for t, n in other.counted]
            # An input whose value is that of a number in the step: the program has them as one.
            and not self._inputs.values.keys() & set(self._constants.values())
        )

    def compile(self) -> None:
        """Have the program ready, and forget the tensors it was traced with."""
        self._hash = _private.program_hash(self._leaves)
        _private.compile_program(self._leaves)
        self._device = str(self._leaves[0].device) if self._leaves else ""
        # The first run still needs the values that the state had before the step.
        self._first: list[Tensor] | None = list(self._values)
        # Numbers that are part of the program, such as the learning rate.
        nothing = torch.empty(0)
        self._fixed = [
            value if i in self._constants else nothing for i, value in enumerate(self._values)
        ]
        del self._leaves, self._values, self._results
        self._calls.forget()

    def run(self, state: list[Tensor], batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Dispatch it; the state's tensors hold the new values then."""
        given = state, batch
        values, self._first = self._first, None
        if values is None:
            values = [
                value if source is None else given[source[0]][source[1]]
                for value, source in zip(self._fixed, self._sources, strict=True)
            ]
            for position in self._seeds:
                values[position] = _private.base_seed(self._device)
        left = _private.run_program(self._hash, values)
        made = [
            left[place] if isinstance(place, int) else given[place[0]][place[1]]
            for place in self._outputs
            if place is not None  # see fault()
        ]
        for position, value in zip(self._changed, made, strict=False):
            # Not _replace_xla_tensor: what is detached later would still be the old value.
            state[position].data = value
        runtime.sync()  # of nothing, for whoever counts steps; it advances the random seed
        return tuple(made[len(self._changed) :])


def _facts(state: list[Tensor]) -> list[tuple]:
    """Return what a program takes for granted about the state's tensors, beside their values."""
    # A gradient that is replaced is another tensor than the one in the state.
    return [(t.dtype, t.requires_grad, t.requires_grad and id(t.grad)) for t in state]


def _at(line: Line | None) -> str:
    return f" ({line.quoted()})" if line else ""


def _some(shapes: list[tuple[int, ...]]) -> str:
    """Return a few shapes, for people."""
    shown = ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")
    return f"{len(shapes)} tensor{'s' * (len(shapes) > 1)} of shape {shown}"
