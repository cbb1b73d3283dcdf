"""Counters and metrics of torch_xla: up to now, over a block, or in a pasted report.

torch_xla counts from the start of the process; a block's share is the difference of two
:func:`now`. A pasted ``metrics_report()`` gives the same object, so every reader takes both.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# `.item()` is counted among the fallbacks by torch_xla, but it is a read.
SCALAR_READ = "aten::_local_scalar_dense"

# Names in other releases and runtimes.
_ALIASES = {
    "TransferToServerTime": "TransferToDeviceTime",
    "TransferFromServerTime": "TransferFromDeviceTime",
}
# An execution is timed under one of them: one device, or all devices of SPMD.
EXECUTE = ("ExecuteTime", "ExecuteReplicatedTime", "ExecuteParallelTime", "ExecuteChainedTime")


class NoMetrics(ValueError):
    """The text holds neither a metric nor a counter of torch_xla."""


@dataclass(frozen=True)
class Metric:
    """Samples of one quantity.

    Attributes:
        samples: their number.
        total: their sum, in seconds, bytes or plain numbers; None where a pasted text ends before
            it.
    """

    samples: int = 0
    total: float | None = 0.0


@dataclass(frozen=True)
class Transfers:
    """One direction between host and device; seconds and bytes are None where unknown."""

    count: int
    seconds: float | None
    bytes: float | None


@dataclass(frozen=True)
class Counters:
    """Compilations, host fallbacks and host reads, as a log keeps them.

    Attributes:
        compilations: programs compiled.
        fallbacks: operations that ran on the host because XLA has no lowering for them.
        host_reads: all reads of the device, see :attr:`Counts.host_reads`.
    """

    compilations: int = 0
    fallbacks: int = 0
    host_reads: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.compilations - earlier.compilations,
            self.fallbacks - earlier.fallbacks,
            self.host_reads - earlier.host_reads,
        )


@dataclass(frozen=True)
class Counts:
    """All counters and metrics by torch_xla's names."""

    counters: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def __sub__(self, earlier: "Counts") -> "Counts":
        counters = {
            name: value - earlier.counters.get(name, 0) for name, value in self.counters.items()
        }
        metrics = {}
        for name, metric in self.metrics.items():
            before = earlier.metrics.get(name, Metric())
            total = None
            if metric.total is not None and before.total is not None:
                total = metric.total - before.total
            metrics[name] = Metric(metric.samples - before.samples, total)
        return Counts(
            {name: value for name, value in counters.items() if value},
            {name: metric for name, metric in metrics.items() if metric.samples},
        )

    def _metric(self, name: str) -> Metric:
        return self.metrics.get(name, Metric())

    @property
    def compilations(self) -> int:
        """Number of programs compiled."""
        return self._metric("CompileTime").samples

    @property
    def compile_seconds(self) -> float | None:
        """Total time of the compilations."""
        return self._metric("CompileTime").total

    @property
    def executions(self) -> int:
        """Number of programs executed to their end."""
        return sum(self._metric(name).samples for name in EXECUTE)

    @property
    def execute_seconds(self) -> float | None:
        """Time from each program's launch to its end on the device, time in the queue included.

        Programs may overlap, so this can exceed the wall time.
        """
        return _sum(self._metric(name).total for name in EXECUTE)

    @property
    def tracing_seconds(self) -> float | None:
        """Time of tracing inside torch_xla; the time in Python is not included."""
        return self._metric("LazyTracing").total

    @property
    def cache(self) -> tuple[int, int]:
        """Hits and misses of the process's cache of compiled programs."""
        found, missed = (self.counters.get(n, 0) for n in ("CachedCompile", "UncachedCompile"))
        return found, missed

    @property
    def repeated(self) -> int:
        """Number of programs called without tracing: by CompiledStep or torch.compile."""
        return self._metric("RunCachedGraphInputData").samples

    @property
    def persistent_cache(self) -> tuple[int, int] | None:
        """Hits and misses of the cache on disk; None where no such cache is in use."""
        names = ("PersistentCacheHit", "PersistentCacheMiss")
        if not any(name in self.counters for name in names):
            return None
        return self.counters.get(names[0], 0), self.counters.get(names[1], 0)

    @property
    def steps(self) -> int:
        """Number of ``torch_xla.sync()``; ``xm.mark_step()`` and ``torch_xla.step()`` call it."""
        return self.counters.get("MarkStep", 0)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Number of host fallbacks of each operation, the most frequent first."""
        found = {
            name.removeprefix("aten::"): value
            for name, value in self.counters.items()
            if name.startswith("aten::") and name != SCALAR_READ
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def scalar_reads(self) -> int:
        """Number of single values read, as by ``.item()`` and ``if tensor:``."""
        return self.counters.get(SCALAR_READ, 0)

    @property
    def host_reads(self) -> int:
        """Number of all reads: single values, and whole tensors (``.cpu()``, ``print``).

        Inputs of a fallback are not reads: the fallback is counted.
        """
        # A fallback, and so a single value, reads its inputs through `_to_cpu`.
        inputs = self.counters.get("xla::_to_cpu", 0)
        tensors = self._metric("TransferFromDeviceTime").samples - inputs
        return self.scalar_reads + max(0, tensors)

    @property
    def to_device(self) -> Transfers:
        """Transfers from host to device."""
        time, data = self._metric("TransferToDeviceTime"), self._metric("OutboundData")
        return Transfers(max(time.samples, data.samples), time.total, data.total)

    @property
    def from_device(self) -> Transfers:
        """Transfers from device to host; seconds include the wait for the computation."""
        time, data = self._metric("TransferFromDeviceTime"), self._metric("InboundData")
        return Transfers(max(time.samples, data.samples), time.total, data.total)

    def brief(self) -> Counters:
        """Return the counters that a log keeps."""
        return Counters(self.compilations, sum(self.fallbacks.values()), self.host_reads)


def now() -> Counts:
    """Return torch_xla's counters and metrics, as totals since the process started."""
    import torch_xla.debug.metrics as met

    metrics = {}
    for name in met.metric_names():
        samples, total, _ = met.metric_data(name)
        unit = 1e-9 if _is_time(name) else 1  # nanoseconds
        metrics[_ALIASES.get(name, name)] = Metric(samples, total * unit)
    return Counts({name: met.counter_value(name) for name in met.counter_names()}, metrics)


def _is_time(name: str) -> bool:
    return name not in ("InboundData", "OutboundData", "InputOutputAliasCount", "TensorsGraphSize")


# Quote marks, prompts and indentation come with pasted text.
_LINE = re.compile(r"^[\s>|#]*(Metric|Counter|TotalSamples|Accumulator|Value):\s*(\S+)")
_TIME = re.compile(
    r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+)s)?(?:(\d+)ms)?(?:(\d*\.?\d+)us)?"
)
_TIME_UNITS = (86400, 3600, 60, 1, 1e-3, 1e-6)  # seconds
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|KB|MB|GB|TB|PB|)")


def parse(text: str) -> Counts:
    """Return the numbers in the text of ``metrics_report()`` or ``short_metrics_report()``.

    A text that begins or ends in the middle gives the numbers that are in it.

    Raises:
        NoMetrics: there are none.
    """
    counters: dict[str, int] = {}
    metrics: dict[str, Metric] = {}
    counter = metric = ""
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found:
            continue
        key, value = found.groups()
        if key == "Metric":
            metric, counter = _ALIASES.get(value, value), ""
        elif key == "Counter":
            counter, metric = value, ""
        elif key == "Value" and counter and value.isdigit():
            counters[counter] = int(value)
        elif key == "TotalSamples" and metric and value.isdigit():
            metrics[metric] = Metric(int(value), None)
        elif key == "Accumulator" and metric in metrics:
            metrics[metric] = Metric(metrics[metric].samples, quantity(value))
    if not counters and not metrics:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "")
        raise NoMetrics(
            "no metrics report: there is neither a 'Metric: …' with its TotalSamples nor a "
            f"'Counter: …' with its Value in it; the text begins with {first[:40]!r}. Paste what "
            "print(torch_xla.debug.metrics.metrics_report()) printed"
        )
    return Counts(counters, metrics)


def quantity(text: str) -> float | None:
    """Return ``"01m03s456ms789.012us"`` in seconds, ``"1.21GB"`` in bytes, ``"376.00"`` as it is.

    None for anything else.
    """
    size = _SIZE.fullmatch(text)
    if size:
        power = ("", "B", "KB", "MB", "GB", "TB", "PB").index(size[2])
        return float(size[1]) * 1024 ** max(0, power - 1)
    time = _TIME.fullmatch(text)
    if not time or not text:
        return None
    total = 0.0
    for number, unit in reversed(list(zip(time.groups(), _TIME_UNITS))):
        # torch_xla rounds each part instead of truncating it: 40.574 ms is 041ms574.000us.
        rounded_up = number and total >= unit / 2
        total += (float(number or 0) - bool(rounded_up)) * unit
    return total


def _sum(values: Iterable[float | None]) -> float | None:
    """Return their sum, None if one is unknown."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total
