"""Lines of the user's code: which one asked for something."""

import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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
        """The source, or an empty string where it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def quoted(self) -> str:
        """Return place and source, for people."""
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
    """Return the innermost frame outside torch, torch_xla, this package and Python itself.

    Args:
        frame: where to start, such as ``sys._getframe(1)``.

    Returns:
        None where there is none, as in autograd's own threads.
    """
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a source file belongs to Python, torch, torch_xla or this package."""
    of_python = file.startswith(_LIBRARIES) and not file.startswith(_PACKAGES)
    return of_python or file.startswith(("<frozen", *_INSIDE))


def is_installed(file: str) -> bool:
    """Return whether a source file belongs to an installed package."""
    return file.startswith(_PACKAGES)


_LIBRARIES = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib"))
_INSIDE = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(torch.__file__).parents[1] / "torch_xla") + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parents[1] / "typing_extensions.py"),  # around what is deprecated
)
