"""Compile a step for a TPU that is not there: ``aot.estimate(step, inputs, topology="v5e:1x1")``.

libtpu holds the whole TPU compiler, and compiling takes no TPU. So a step is traced as always, its
program is compiled for a slice of your choice, and the compiled program tells its needs: memory,
bytes moved, operations, what the cores exchange. It does not tell how long a step takes;
:meth:`Chip.roofline <tpuscope.engine.tpu_specs.Chip.roofline>` gives the least time.

The compiler runs in a process of its own, which may be another Python's with a newer libtpu
(:class:`Toolchain`), and its answers are kept (:func:`cache_folder`). A program that was saved as
StableHLO is compiled by :func:`compile_program` and :func:`read_program`.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files

if TYPE_CHECKING:
    from ..engine.lazy_graph import Program
    from .compiler import CompilerFailed, compile_program, require_compiler
    from .report import Report
    from .saved import read_program
    from .toolchain import CompilerUnavailable, Toolchain
    from .tracing import StepIsCut, estimate, in_new_process, trace

    compile = estimate

__all__ = [
    "EFFORTS",
    "CompilerFailed",
    "CompilerUnavailable",
    "Program",
    "Report",
    "StepIsCut",
    "Toolchain",
    "cache_folder",
    "compile",
    "compile_program",
    "estimate",
    "in_new_process",
    "read_program",
    "require_compiler",
    "trace",
]

EFFORTS = ("fast", "full")

_HOMES = {
    "Program": "..engine.lazy_graph",
    "Report": ".report",
    "read_program": ".saved",
    **dict.fromkeys(("CompilerFailed", "compile_program", "require_compiler"), ".compiler"),
    **dict.fromkeys(("CompilerUnavailable", "Toolchain"), ".toolchain"),
    **dict.fromkeys(("StepIsCut", "estimate", "in_new_process", "trace"), ".tracing"),
}


def cache_folder() -> Path:
    """Return the folder of kept answers, ``torch_xla_aot`` below :func:`files.cache_folder`."""
    return files.cache_folder("torch_xla_aot")


def __getattr__(name: str) -> Any:
    # Imported when used: `tpuscope --help` answers before torch is loaded.
    if name == "compile":
        return __getattr__("estimate")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
