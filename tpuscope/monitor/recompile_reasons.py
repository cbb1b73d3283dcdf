"""Why a program was compiled: what differs between the calls of two graphs."""

import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..engine.lines import Line
from .calls import Array, Call, Graph, special

# Share of common calls from which two graphs are versions of the same computation; less is enough
# in the first step, where modules and optimizers make their state.
_ALIKE, _ALIKE_FIRST = 0.75, 0.5

# What a cause can be.
FIRST = "first"  # nothing like it has been run
CUT = "cut"  # a read that needed pending operations
FALLBACK = "fallback"  # an operation that ran on the host
SHAPE = "shape"
DTYPE = "dtype"
CONSTANT = "constant"  # data in one graph, pending from before the step in the other
OPERATIONS = "operations"
FIRST_STEP = "first step"  # operations that only the first step has, or has not
VALUE = "value"  # a Python value, or a number that became or was 0 or 1
STATE = "state"  # data in one graph, computed in the other
RESULT = "result"  # of a call with the same arguments: autocast, grad mode
NUMBER = "number"  # a number that this operation makes a part of the graph
UNKNOWN = "unknown"

# Changed data explain changed operations; those and Python values count in the step's own order.
_RANK = {SHAPE: 0, DTYPE: 1, CONSTANT: 2, OPERATIONS: 2, VALUE: 2, STATE: 3, RESULT: 4, NUMBER: 5}

# Their numbers are data beside the program (tests/xla/test_recompile_reasons.py measures it).
_ARITHMETIC = frozenset(["add", "sub", "mul", "div", "rsub", "addcmul", "addcdiv", "lerp"])


@dataclass(frozen=True)
class Cause:
    """What made a graph a new one.

    Attributes:
        kind: one of this module's constants.
        line: where, if known.
        what: for people: the input, the call or the value.
        old: before.
        new: now.
        like: the step, from 1, of the graph that it was compared with.
    """

    kind: str
    line: Line | None = None
    what: str = ""
    old: str = ""
    new: str = ""
    like: int = 0

    def __str__(self) -> str:
        where = f" ({self.line.quoted()})" if self.line else ""
        if self.kind == FIRST:
            return "the first of its kind"
        if self.kind == CUT:
            return f"{self.what}{where} needs a value in the middle of a step"
        if self.kind == FALLBACK:
            return f"{self.what} runs on the host{where}"
        if self.kind == UNKNOWN:
            return self.what
        if self.kind in (OPERATIONS, FIRST_STEP):
            return f"{self.what}{where} ran {self.old}, and then {self.new}"
        return f"{self.what}{where} was {self.old} and became {self.new}"


def find(
    graph: Graph, earlier: Iterable[Graph], harmless: set[tuple[str, Line | None, str]], name: str
) -> Cause:
    """Why this graph had to be compiled.

    Args:
        graph: with its calls.
        earlier: graphs that have run before; those without calls are passed over.
        harmless: arguments (call, line, label) whose number may change without a compilation.
        name: of the call that read, or of the operation that fell back.
    """
    if graph.trigger == "fallback":
        return Cause(FALLBACK, graph.line, name)
    known = [g for g in earlier if g.calls is not None and g.trigger == graph.trigger]
    if graph.trigger == "read":
        known = [g for g in known if g.line == graph.line]
    # Its first step, which need not be step 1: what was pending before the loop is synced, too.
    first = min((g.step for g in known if _trains(g) == _trains(graph)), default=0)
    alike, like = max(
        ((_likeness(g, graph, first), g) for g in known),
        key=lambda pair: (pair[0], pair[1].step),
        default=(0, None),
    )
    if like is None or not alike:
        return Cause(CUT, graph.line, name) if graph.trigger == "read" else Cause(FIRST)
    found = list(differences(like, graph, harmless))
    if not found:
        return Cause(
            UNKNOWN,
            what=f"the calls are those of step {like.step}; what differs is not a PyTorch call: "
            "a result that is still referenced when the step ends, another sharding, or work that "
            "was recorded before",
            like=like.step,
        )
    cause = min(found, key=lambda cause: _RANK[cause.kind])  # the first in the step among equals
    if cause.kind == OPERATIONS and like.step == first and graph.step == first + 1:
        return replace(cause, kind=FIRST_STEP)
    return cause


def differences(
    old: Graph, new: Graph, harmless: Collection[tuple[str, Line | None, str]] = ()
) -> Iterator[Cause]:
    """Yield what differs, in the order of the new graph's calls, then what is gone.

    Args:
        old: the graph to compare with; both have their calls.
        new: the graph in question.
        harmless: see :func:`find`.
    """
    was, now = _numbered(old.calls), _numbered(new.calls)
    times_was, times_now = (Counter(key[:2] for key in keys) for keys in (was, now))
    named = set()  # calls and lines that have been reported

    def other_times(key: tuple, call: Call) -> Iterator[Cause]:
        place = key[:2]
        if place not in named and not call.is_upload:
            named.add(place)
            yield _operations(call, times_was[place], times_now[place], old.step)

    labels = _InputLabels()
    for key, call in now.items():
        before = was.get(key)
        whats = [labels(leaf) for _, leaf in call.arguments]
        if before is None:
            yield from other_times(key, call)
            continue
        # Where a line runs more often than before, its calls cannot be told apart by number.
        if times_was[key[:2]] == times_now[key[:2]]:
            yield from _changed_arguments(before, call, whats, old.step, harmless)
        yield from _changed_result(before, call)
    for key, call in was.items():
        if key not in now:
            yield from other_times(key, call)


class _InputLabels:
    """Names for the step's new data, numbered in the order of use: ``input 0``."""

    def __init__(self):
        self._count = 0

    def __call__(self, leaf: Any) -> str:
        if not isinstance(leaf, Array) or leaf.origin not in ("input", "host"):
            return ""
        self._count += 1
        return f"input {self._count - 1}"


def _changed_arguments(
    old: Call,
    new: Call,
    whats: list[str],
    like: int,
    harmless: Collection[tuple[str, Line | None, str]],
) -> Iterator[Cause]:
    before = dict(old.arguments)
    for (label, leaf), what in zip(new.arguments, whats, strict=True):
        if label not in before:
            continue
        for cause in _argument(new, label, before[label], leaf, what, like):
            if cause.kind != NUMBER or (new.name, new.line, label) not in harmless:
                yield cause


def _changed_result(old: Call, new: Call) -> Iterator[Cause]:
    """Yield the first result that differs although the arguments do not."""
    if old.arguments != new.arguments:
        return
    for a, b in zip(old.results, new.results):
        if a != b:
            yield Cause(RESULT, new.line, f"the result of {new.name}", *_results(a, b))
            return


def _trains(graph: Graph) -> bool:
    return any(call.name == "backward" for call in graph.calls or ())


def _likeness(old: Graph, new: Graph, first: int) -> float:
    """Common calls' share of all if these are versions of the same computation, else 0.

    A training step and an evaluation are not, nor are two phases of a training. In the step after
    the `first` less is enough.
    """
    if _trains(old) != _trains(new):
        return 0.0
    was, now = _numbered(old.calls).keys(), _numbered(new.calls).keys()
    common = len(was & now)
    if old.step == first and new.step == first + 1:
        share, enough = common / max(1, min(len(was), len(now))), _ALIKE_FIRST
    else:
        share, enough = common / max(1, len(was | now)), _ALIKE
    return share if share >= enough else 0.0


def _numbered(calls: Iterable[Call] | None) -> dict[tuple[str, Line | None, int], Call]:
    """Calls by name, line and how many of that name and line came before."""
    seen: Counter = Counter()
    result = {}
    for call in calls or ():
        place = (call.name, call.line)
        result[(*place, seen[place])] = call
        seen[place] += 1
    return result


def _operations(call: Call, old: int, new: int, like: int) -> Cause:
    def times(count: int) -> str:
        return {0: "not at all", 1: "once"}.get(count, f"{count} times")

    return Cause(OPERATIONS, call.line, call.name, times(old), times(new), like)


def _argument(call: Call, label: str, old: Any, new: Any, what: str, like: int) -> Iterator[Cause]:
    if isinstance(old, Array) and isinstance(new, Array):
        what = what or f"a tensor in {call.name}"
        if new.origin not in ("made", "uploaded"):  # its source has been said
            if old.shape != new.shape:
                yield Cause(SHAPE, call.line, what, str(old.shape), str(new.shape), like)
            if old.dtype != new.dtype:
                yield Cause(DTYPE, call.line, what, old.dtype, new.dtype, like)
        if special(old.value) != special(new.value):
            number = f"the number in {call.name}"
            yield Cause(VALUE, call.line, number, str(old.value), str(new.value), like)
        a, b = _part_of_graph(old), _part_of_graph(new)
        if a != b:
            pending = any(array.origin.startswith("pending ") for array in (old, new))
            kind = CONSTANT if pending else STATE
            yield Cause(kind, call.line, f"{what}, {new.shape},", a, b, like)
    elif type(old) is not type(new) or old != new:
        kind = VALUE
        if type(old) is float and type(new) is float and special(old) == special(new):
            if call.name.strip("_").removeprefix("i") in _ARITHMETIC:
                return
            kind = NUMBER
        yield Cause(kind, call.line, f"{_label(call, label)}", str(old), str(new), like)


def _part_of_graph(array: Array) -> str:
    if array.origin.startswith("pending "):
        operation = array.origin.removeprefix("pending ")
        return f"a part of the graph ({operation})"
    return "computed in the graph" if array.origin == "made" else "data"


def _results(old: tuple, new: tuple) -> tuple[str, str]:
    names = ("shape", "dtype", "device", "requires_grad")
    changed = [i for i in range(len(names)) if old[i] != new[i]]
    was, now = (", ".join(f"{names[i]} {result[i]}" for i in changed) for result in (old, new))
    return was, now


def _label(call: Call, label: str) -> str:
    """An argument for people: its name where the function can be asked, else its position."""
    first, _, rest = label.partition(".")
    if not first.isdigit():
        return f"{label} in {call.name}"
    function = getattr(torch.nn.functional, call.name, None)
    try:
        names = list(inspect.signature(function).parameters) if function else []
    except ValueError:  # of C
        names = []
    if int(first) < len(names):
        return f"{names[int(first)]}{'.' * bool(rest)}{rest} in {call.name}"
    return f"argument {first}{'.' * bool(rest)}{rest} of {call.name}"
