"""A step as PyTorch's calls: the data types that recorder and recompile_reasons share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.lines import Line


class Array(NamedTuple):
    """A tensor among a call's arguments or results.

    Attributes:
        origin: ``"made"`` by an earlier call of the same graph; ``"kept"`` from an earlier step;
            ``"input"``, data that is new in this step; ``"uploaded"``, the same seen when it came;
            ``"host"``, on the CPU; or ``"pending OPERATION"``, a part of this graph that no call
            of it has made.
        value: of a tensor without dimensions on the host.
    """

    shape: tuple[int, ...]
    dtype: str
    origin: str
    value: float | None = None

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class Call(NamedTuple):
    """One call: its name, the line, its arguments by label, and its results."""

    name: str
    line: Line | None
    arguments: tuple[tuple[str, Any], ...]
    results: tuple[Any, ...]

    @property
    def is_upload(self) -> bool:
        """Return whether it only brings data, and is no operation of the graph."""
        arrays = [leaf for _, leaf in self.arguments if isinstance(leaf, Array)]
        return bool(arrays) and all(array.origin == "host" for array in arrays)


@dataclass(eq=False)
class Graph:
    """What was run as one program, as far as the calls show.

    Attributes:
        signature: equal for graphs that are the same program to torch_xla.
        trigger: ``"sync"``, ``"read"`` or ``"fallback"``.
        line: where it was run.
        calls: None when too many other graphs have come since.
        inputs: the data that was new when it ran.
        step: in which it was first seen, from 1.
        runs: how often it was seen.
        compiled: how often it was compiled: more than once if it holds a number that changes.
    """

    signature: int
    trigger: str
    line: Line | None
    calls: tuple[Call, ...] | None
    inputs: tuple[Array, ...]
    step: int
    runs: int = 0
    compiled: int = 0


def special(number: float | None) -> Any:
    """Return 0, 1 and None as they are, which the graph holds, and a word for other numbers."""
    return number if number in (None, 0, 1) else "number"
