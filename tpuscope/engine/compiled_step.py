"""Steps that are traced twice and then repeated: ``step = CompiledStep(step, state)``.

torch_xla writes a step down anew whenever it runs, operation by operation, and then finds out that
it knows the program. For a step of MSHNet that takes the host a tenth of a second or more, whatever
the batch; a TPU that computes the step in less waits for the rest. Here the first two steps are
traced, the second to see that it is the first again. After them the compiled program is called with
the present state and the next batch, as ``torch.compile(backend="openxla")`` does, too.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from . import lazy_graph, metrics
from . import torch_xla as runtime


class CompiledStep:
    """A step on the XLA device that costs the host next to nothing after its second call.

    What a step does on the host is done in these two calls only: everything that differs from step
    to step must come as an argument. A step that cannot be repeated is traced each time, with the
    same numbers; :attr:`why` says why. Numbers that change later than in the second step (a
    learning rate's schedule) are not noticed: make a new CompiledStep then, or hand them over as
    tensors.

    Args:
        step: from tensors to a tuple of tensors, all on the device. It may change the state in
            place; it must not end itself (``torch_xla.sync()``), nor read a value.
        state: tensors on the device that the step reads or changes, beside its arguments:
            parameters, buffers, the optimizer's sums. They must be there before the first call.
        counted: tensors on the host that a step may raise by one: an optimizer's count of steps.

    Attributes:
        why: why steps are traced each time, or None.
    """

    def __init__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        state: Iterable[Tensor],
        counted: Iterable[Tensor] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ):
        self.fallback_reason: str | None = None
        self._step = step
        self._state = list(state)
        self._counted = list(counted)
        self._programs: dict[tuple, _Program] = {}

    def __call__(self, *batch: Tensor) -> tuple[Tensor, ...]:
        """One step, dispatched; nothing is left to be computed by the next ``torch_xla.sync()``."""
        if self.fallback_reason:
            return self._as_usual(batch)
        key = tuple((t.shape, t.dtype) for t in batch)
        program = self._programs.get(key)
        _settle([*self._state, *batch])
        if program is None or not program.seen_twice:
            return self._trace(key, batch, program)
        if program.counted:
            torch._foreach_add_(program.counted, 1)
        return program.run(self._state, batch)

    def _as_usual(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = self._step(*batch)
        runtime.sync()
        return results

    def _trace(
        self, key: tuple, batch: tuple[Tensor, ...], before: "_Program | None"
    ) -> tuple[Tensor, ...]:
        """Trace a step, keep its program, and run it.

        Args:
            key: shapes and types of the batch.
            batch: the step's arguments.
            before: the program of the step before, if there was one.
        """
        runtime.wait()  # a program of the step before would be counted as one of this one
        known = lazy_graph.marks(lazy_graph.pending())
        places = {n: (0, i) for i, t in enumerate(self._state) for n in _numbers(t)}
        places |= {n: (1, i) for i, t in enumerate(batch) for n in _numbers(t)}
        executed = metrics.now().executions
        counted = [t.clone() for t in self._counted]
        with _Numbers() as numbers:
            results = self._step(*batch)
        if metrics.now().executions > executed:
            self.fallback_reason = (
                "a part of the step ran while it was traced: a value was read, or an \
operation without lowering ran on the host"
            )
        else:
            program = _Program(self._state, batch, results, places)
            program.numbers = numbers.seen
            self.fallback_reason = program.fault(known) or program.difference(before)
        if self.fallback_reason:
            runtime.sync()
            return results
        # Warm-up leaves out heads, and the optimizer does not count their steps.
        pairs = zip(self._counted, counted, strict=True)
        program.counted = [t for t, before in pairs if not torch.equal(t, before)]
        program.compile()
        program.seen_twice = before is not None and before.same_as(program)
        self._programs[key] = program
        del results  # or the next sync would compute them
        return program.run(self._state, batch)


def _numbers(tensor: Tensor) -> set[int]:
    """By which a program may know a tensor: its own, and that of the tensor its value was made for.

    The second is another where the value was moved from one tensor to another.
    """
    import torch_xla

    numbers, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return {torch_xla._XLAC._xla_get_tensor_id(tensor), *numbers}


class _Numbers(TorchFunctionMode):
    """Sees the calls of a step and the numbers that they are given.

    Such as Adam's correction for the first steps. The backward pass has none of its own.
    """

    def __init__(self):
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        numbers = tuple(
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (bool, int, float))
        )
        self.seen.append((getattr(function, "__name__", ""), numbers))
        return function(*args, **kwargs)


def _settle(tensors: list[Tensor]) -> None:
    """A program takes values, and nothing that has yet to be computed."""
    import torch_xla

    if any(torch_xla._XLAC._check_tensor_need_materialization(tensors)):
        runtime.sync()


class _Program:
    """What a traced step reads and leaves, by its place in state, batch and results.

    Args:
        state: after the step was traced.
        batch: what it was traced with.
        results: what it returned.
        places: of state and batch, by the numbers that they had before the step.

    Attributes:
        counted: host tensors that each run raises by one.
        numbers: calls of the traced step, with the numbers in their arguments.
        seen_twice: whether two steps, one after the other, were the same.
    """

    def __init__(
        self,
        state: list[Tensor],
        batch: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
        places: dict[int, tuple[int, int]],
    ):
        import torch_xla

        xla = torch_xla._XLAC
        self.counted: list[Tensor] = []
        self.numbers: list[tuple] = []
        self.seen_twice = False
        waiting = xla._check_tensor_need_materialization(state)
        self._changed = [i for i, waits in enumerate(waiting) if waits]
        # A result that is an argument, untouched, is no result of the program.
        self._passed = {
            i: j for i, t in enumerate(results) for j, given in enumerate(batch) if t is given
        }
        self._made = [t for i, t in enumerate(results) if i not in self._passed]
        self._count = len(results)
        self._leaves = [*(state[i] for i in self._changed), *self._made]
        numbers, self._values = xla._get_tensors_xla_device_data_node(self._leaves)
        self._sources = [places.get(number) for number in numbers]

    def fault(self, known: frozenset[str]) -> str | None:
        """Why the program cannot be repeated, or None.

        Args:
            known: marks of tensors that waited before the step.
        """
        strangers = [
            tuple(value.shape)
            for value, source in zip(self._values, self._sources, strict=True)
            if source is None and isinstance(value, Tensor) and value.dim() > 0
        ]
        if strangers:
            return f"the step reads {_some(strangers)}, neither state nor arguments"
        marks = lazy_graph.marks(self._leaves)
        others = [tuple(t.shape) for t in lazy_graph.pending(known | marks)]
        if others:
            return f"the step leaves {_some(others)}, neither state nor results"
        return None

    def difference(self, before: "_Program | None") -> str | None:
        """What differs from the step before, or None. Numbers are part of a program."""
        if before is None:
            return None
        for old, new in zip(before.numbers, self.numbers, strict=False):
            if old != new:
                return f"the numbers of a step differ from those of the step before: {old}, {new}"
        if len(before.numbers) != len(self.numbers):
            return "a step makes other calls than the step before"
        return None

    def same_as(self, other: "_Program") -> bool:
        """Whether both compute the same; after :meth:`compile`."""
        return self._hash == other._hash

    def compile(self) -> None:
        """Have the program ready, and forget the tensors it was traced with."""
        import torch_xla

        self._hash = torch_xla._XLAC._get_graph_hash(self._leaves)
        torch_xla._XLAC._xla_warm_up_cache(self._leaves, [])
        pairs = zip(self._values, self._sources, strict=True)
        # Numbers that are part of the program, such as the learning rate.
        self._constants = [value if source is None else None for value, source in pairs]
        # The first run still needs the values that the state had before the step.
        self._first = list(self._values)
        del self._leaves, self._made, self._values

    def run(self, state: list[Tensor], batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Dispatch it; the state's tensors hold the new values then."""
        import torch_xla

        given = state, batch
        values, self._first = self._first, None
        if values is None:
            values = [
                constant if source is None else given[source[0]][source[1]]
                for constant, source in zip(self._constants, self._sources, strict=True)
            ]
        left = torch_xla._XLAC._run_cached_graph(self._hash, values)
        for place, value in zip(self._changed, left, strict=False):
            # Not _replace_xla_tensor: what is detached later would still be the old value.
            state[place].data = value
        runtime.sync()  # of nothing, for whoever counts steps
        made = iter(left[len(self._changed) :])
        return tuple(
            batch[self._passed[i]] if i in self._passed else next(made) for i in range(self._count)
        )


def _some(shapes: list[tuple[int, ...]]) -> str:
    """For people."""
    shown = ", ".join(map(str, shapes[:3])) + (", …" if len(shapes) > 3 else "")
    return f"{len(shapes)} tensor{'s' * (len(shapes) > 1)} of shape {shown}"
