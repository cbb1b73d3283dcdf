"""Measure two implementations of the same work side by side."""

import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tpuscope.progress import hide_progress


@dataclass
class Row:
    """A line of the table: the same work in the official implementation and ours.

    Attributes:
        key: in ``ratios``.
        title: what is done.
        unit: of the values; ``"…/s"`` is a rate, of which more is better.
        official: one value a round.
        ours: one value a round.
        goal: least ratio wanted, None for a row that is for information.
        checked: what was found equal, in this run.
        note: anything else that a reader needs.
    """

    key: str
    title: str
    unit: str
    official: list[float]
    ours: list[float]
    goal: float | None = None
    checked: str = ""
    note: str = ""

    @property
    def ratio(self) -> float:
        """Return how many times better ours is, by the medians."""
        return self._ratio(statistics.median(self.official), statistics.median(self.ours))

    @property
    def spread(self) -> tuple[float, float]:
        """Return the smallest and largest ratio of one round."""
        ratios = [self._ratio(a, b) for a, b in zip(self.official, self.ours, strict=True)]
        return min(ratios), max(ratios)

    def _ratio(self, official: float, ours: float) -> float:
        return ours / official if self.unit.endswith("/s") else official / ours

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return vars(self) | {"ratio": self.ratio, "spread": self.spread}


@dataclass
class Clock:
    """Seconds of two implementations in turns, so that load drift affects both equally."""

    official: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def take_turns(
        self, official: Callable[[], Any], ours: Callable[[], Any], rounds: int
    ) -> "Clock":
        """Run each implementation ``rounds`` times, in turns."""
        for _ in range(rounds):
            self.official.append(seconds(official))
            self.ours.append(seconds(ours))
        return self


def alone(function: Callable, *args: Any, **environment: str) -> Any:
    """Return the result of a module's function, called in a fresh process.

    Args:
        environment: variables of that process.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_quietly, environment, function, *args).result()


def _quietly(environment: dict[str, str], function: Callable, *args: Any) -> Any:
    os.environ.update({"TF_CPP_MIN_LOG_LEVEL": "2"} | environment)
    hide_progress()  # it would run through the table
    return function(*args)


_AT_WORK: dict[str, Any] = {}  # in a process of Apart


class Apart:
    """Two implementations that take turns in their own processes.

    What one does to its process (how it keeps memory, log) does nothing to the other.

    Args:
        make: of an importable module; from a way's name to an object with a method of that name,
            which does the work once, and a method ``report``.
    """

    def __init__(self, make: Callable[[str], Any]):
        spawn = multiprocessing.get_context("spawn")
        self._processes = {name: ProcessPoolExecutor(1, spawn) for name in ("official", "ours")}
        for name, process in self._processes.items():
            process.submit(_quietly, {}, _begin, make, name).result()

    def __enter__(self) -> "Apart":
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes.values():
            process.shutdown()

    def seconds(self, name: str) -> float:
        """Return the seconds of one turn of an implementation."""
        return self._processes[name].submit(_turn, name).result()

    def take_turns(self, rounds: int) -> Clock:
        """Run each ``rounds`` times, after an uncounted first one that allocates or compiles."""
        clock = Clock()
        for number in range(rounds + 1):
            for name in ("official", "ours"):
                took = self.seconds(name)
                if number:
                    getattr(clock, name).append(took)
        return clock

    def report(self, name: str) -> Any:
        """Return the report of an implementation's object."""
        return self._processes[name].submit(_report).result()


def _begin(make: Callable[[str], Any], name: str) -> None:
    _AT_WORK["work"] = make(name)


def _turn(name: str) -> float:
    return seconds(getattr(_AT_WORK["work"], name))


def _report() -> Any:
    return _AT_WORK["work"].report()


def seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory() -> float:
    """Return the peak memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def close(ours: float, official: float, share: float, what: str) -> None:
    """Raise RuntimeError unless both implementations give the same numbers.

    Raises:
        RuntimeError: they differ by more than a share of the official one.
    """
    if not abs(ours - official) <= share * abs(official):
        raise RuntimeError(
            f"{what}: {ours} here, {official} in the official implementation; nothing to compare"
        )


def machine() -> dict[str, Any]:
    """Return the machine and the versions of the measurement."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torch_xla", "pillow", "libtpu")},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
