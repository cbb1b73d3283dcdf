"""A step as PyTorch's calls: the words that the recorder and the search for causes share."""

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self._name()}:{self.number}"

    @property
    def text(self) -> str:
        """The source, or an empty string where it cannot be had."""
        return linecache.getline(self.file, self.number).strip()

    def quoted(self) -> str:
        """For people: place and source."""
        text = self.text if len(self.text) <= 48 else f"{self.text[:45]}..."
        return f"{self} `{text}`" if text else str(self)

    def _name(self) -> str:
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        name_cell = getattr(getattr(shell, "compile", None), "format_code_name", None)
        cell = name_cell(self.file) if name_cell else None
        if cell:  # ("Cell", "In[5]")
            return cell[1]
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            return str(path.relative_to(Path.cwd()))
        return "/".join(path.parts[-2:])


def caller(frame: FrameType | None) -> Line | None:
    """The innermost frame outside torch, torch_xla, this folder and Python itself, from here up."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _is_ours:
            _is_ours[file] = file.startswith("<frozen") or (
                file.startswith(_LIBRARIES) and not file.startswith(_PACKAGES)
            )
            _is_ours[file] |= file.startswith(_INSIDE)
        if not _is_ours[file]:
            return Line(file, frame.f_lineno)
        frame = frame.f_back
    return None  # autograd's own thread


_is_ours: dict[str, bool] = {}
_LIBRARIES = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_INSIDE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(torch.__file__).parents[1] / "torch_xla") + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(torch.__file__).parents[1] / "typing_extensions.py"),  # around what is deprecated
)


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
        """Whether it only brings data: no operation of the graph."""
        arrays = [leaf for _, leaf in self.arguments if isinstance(leaf, Array)]
        return bool(arrays) and all(array.origin == "host" for array in arrays)


@dataclass(eq=False)
class Graph:
    """What was run as one program, as far as the calls tell.

    Attributes:
        signature: equal for graphs that torch_xla would take for the same one.
        trigger: ``"sync"``, ``"read"`` or ``"fallback"``.
        line: where it was run.
        calls: None when too many others have come since.
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
    """0 and 1 are constants of the graph, any other number is the same to it."""
    return number if number in (None, 0, 1) else "number"
