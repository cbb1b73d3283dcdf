"""Tools for any PyTorch program on a TPU.

* :func:`watch` a running loop: what was compiled and why, fallbacks, reads, and their lines;
  :func:`compare` two steps, :func:`from_text` reads a pasted ``metrics_report()``.
* :class:`CompiledStep`: trace a step once, then call its program.
* :class:`FxStep`: a step as one program on TorchTPU, and on other eager engines.
* :mod:`tpuscope.aot`: compile a step for a TPU that is not there (``tpuscope aot``).
* :func:`track`: what each layer of a model costs.
* :mod:`tpuscope.doctor`: what works on this machine (``tpuscope doctor``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine.compiled_step import CompiledStep
    from .engine.fx_step import FxStep
    from .errors import Failed, RequestError
    from .monitor.layers import track
    from .monitor.watch import Budget, BudgetExceeded, compare, from_text, timeline, watch

__all__ = [
    "Budget",
    "BudgetExceeded",
    "CompiledStep",
    "Failed",
    "FxStep",
    "RequestError",
    "__version__",
    "compare",
    "from_text",
    "timeline",
    "track",
    "watch",
]

_HOMES = {
    "CompiledStep": "engine.compiled_step",
    "Failed": "errors",
    "FxStep": "engine.fx_step",
    "RequestError": "errors",
    "track": "monitor.layers",
    **dict.fromkeys(
        ("Budget", "BudgetExceeded", "compare", "from_text", "timeline", "watch"), "monitor.watch"
    ),
}


def __getattr__(name: str) -> Any:
    # Imported when used: `tpuscope doctor` has to start where torch does not.
    if name in ("aot", "doctor"):
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
