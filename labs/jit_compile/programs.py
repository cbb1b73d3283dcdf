"""Count what TensorFlow traces and what XLA compiles.

TensorFlow counts its tracings (``experimental_get_tracing_count``), and not XLA's compilations. So
those are counted by the files that XLA writes for each program (``--xla_dump_to``).
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpuscope.figure import Picture
from tpuscope.tables import table as aligned

DUMP = "--xla_dump_to"
COLOURS = ("#ff453a", "#ff9f0a", "#0a84ff")


def prepare() -> "Programs":
    """Set what TensorFlow reads at import and at its first compilation.

    Its start-up messages go, and XLA writes each program that it compiles into a folder. A second
    call changes nothing.

    Raises:
        RuntimeError: torch_xla is in this process, or TensorFlow came before these settings.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    present = re.search(DUMP + r"=(\S+)", flags)
    if "torch_xla" in sys.modules:
        raise RuntimeError("torch_xla is imported already, and TensorFlow aborts beside it; "
                           "restart the kernel")  # fmt: skip
    if "tensorflow" in sys.modules and not present:
        raise RuntimeError("tensorflow is imported already; restart the kernel and call this first")
    folder = Path(present[1]) if present else Path(tempfile.mkdtemp(prefix="programs-"))
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # errors come as exceptions, too
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # it announces itself, and sums in another order
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["XLA_FLAGS"] = dumping(flags, folder)
    return Programs(folder)


def dumping(flags: str, dumps: Path) -> str:
    """Return XLA_FLAGS with another dump folder; the other flags stay."""
    others = [flag for flag in flags.split() if not flag.startswith(DUMP)]
    return " ".join([*others, f"{DUMP}={dumps}"])


@dataclass(frozen=True)
class Call:
    """A call's result, and its counts and time.

    Attributes:
        result: of the function.
        seconds: until the result was there.
        traced: tracings of the function, or of the tf.functions that it was given.
        compiled: programs that XLA compiled.
    """

    result: Any
    seconds: float
    traced: int
    compiled: int


class Programs:
    """Counts programs that XLA compiled in this process, by its dump files.

    Args:
        folder: of ``--xla_dump_to``.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def count(self) -> int:
        """Return the number of programs so far."""
        return sum(1 for _ in self.folder.glob("*.before_optimizations.txt"))

    def call(self, function: Callable, *arguments: Any) -> Call:
        """Call a function; on a CPU TensorFlow returns when the result is ready."""
        traced = (function, *arguments)
        before, traces = self.count(), _traces(traced)
        started = time.perf_counter()
        result = function(*arguments)
        seconds = time.perf_counter() - started
        return Call(result, seconds, _traces(traced) - traces, self.count() - before)

    def calls(self, function: Callable, several: Iterable[tuple]) -> Call:
        """Return the sum of several calls with these arguments; the result is the last one's."""
        calls = [self.call(function, *arguments) for arguments in several]
        sums = (sum(getattr(c, n) for c in calls) for n in ("seconds", "traced", "compiled"))
        return Call(calls[-1].result, *sums)

    def fastest(self, function: Callable, *arguments: Any, of: int = 20) -> Call:
        """Return the fastest of several calls."""
        calls = [self.call(function, *arguments) for _ in range(of)]
        return min(calls, key=lambda call: call.seconds)


def _traces(values: Sequence) -> int:
    """Return the tracings so far of the tf.functions among some values."""
    counts = (getattr(value, "experimental_get_tracing_count", None) for value in values)
    return sum(count() for count in counts if count)


def table(rows: Sequence[tuple[str, Call]]) -> str:
    """Return calls as lines: name, traced, compiled, milliseconds."""
    head = ("", "traced", "compiled", "ms")
    body = [(n, str(c.traced), str(c.compiled), f"{1e3 * c.seconds:.1f}") for n, c in rows]
    return aligned([head, *body], "<>>>")


def bars(ways: dict[str, Sequence[Call]], groups: Sequence[str]) -> Picture:
    """Draw milliseconds of calls as bars: a colour for each way, a group for each of its calls."""
    figure = Picture(figsize=(7.5, 2.8), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(ways)
    for number, (name, calls) in enumerate(ways.items()):
        places = np.arange(len(calls)) + (number - (len(ways) - 1) / 2) * width
        heights = [1e3 * call.seconds for call in calls]
        axis.bar(places, heights, width * 0.92, label=name, color=COLOURS[number % len(COLOURS)])
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.3e3 * min(call.seconds for calls in ways.values() for call in calls))
    axis.set_ylabel("milliseconds")
    axis.set_xticks(range(len(groups)), groups)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
