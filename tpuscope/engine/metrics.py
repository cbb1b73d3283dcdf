"""What torch_xla has counted: up to now, over a block, or in the text of somebody's report.

torch_xla counts from the start of the process; what a block did is the difference of two
:func:`now`. A pasted ``metrics_report()`` gives the same object, so whatever reads one reads both.
"""

import re
from dataclasses import dataclass, field

# `.item()` is counted among the fallbacks by torch_xla, but it is a read.
SCALAR_READ = "aten::_local_scalar_dense"

# Names of other releases and runtimes.
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
        samples: how many.
        total: their sum, in seconds, bytes or plain numbers; None where a pasted text breaks off
            before it.
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
    """The three numbers that a training log keeps."""

    compilations: int = 0
    fallbacks: int = 0  # operations that ran on the host because XLA has no lowering for them
    host_reads: int = 0  # scalars fetched from the device

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
            metrics[name] = Metric(metric.samples - before.samples, metric.total - before.total)
        return Counts(
            {name: value for name, value in counters.items() if value},
            {name: metric for name, metric in metrics.items() if metric.samples},
        )

    def _metric(self, name: str) -> Metric:
        return self.metrics.get(name, Metric())

    @property
    def compilations(self) -> int:
        """Programs compiled."""
        return self._metric("CompileTime").samples

    @property
    def compile_seconds(self) -> float | None:
        """From the start of each compilation to its end."""
        return self._metric("CompileTime").total

    @property
    def executions(self) -> int:
        """Programs that were run to their end."""
        return sum(self._metric(name).samples for name in EXECUTE)

    @property
    def execute_seconds(self) -> float | None:
        """From the launch of each program to its end on the device, the waiting in line included.

        Programs may overlap, so this can be more than the time that has passed.
        """
        return _sum(self._metric(name).total for name in EXECUTE)

    @property
    def tracing_seconds(self) -> float | None:
        """In torch_xla's own part of recording operations; Python's part is not in it."""
        return self._metric("LazyTracing").total

    @property
    def cache(self) -> tuple[int, int]:
        """Programs asked for: found in the process's cache, not found there."""
        found, missed = (self.counters.get(n, 0) for n in ("CachedCompile", "UncachedCompile"))
        return found, missed

    @property
    def repeated(self) -> int:
        """Programs that were called without tracing a step: by a replay, or by torch.compile."""
        return self._metric("RunCachedGraphInputData").samples

    @property
    def persistent_cache(self) -> tuple[int, int] | None:
        """Programs found and not found on disk; None where no such cache is in use."""
        names = ("PersistentCacheHit", "PersistentCacheMiss")
        if not any(name in self.counters for name in names):
            return None
        return self.counters.get(names[0], 0), self.counters.get(names[1], 0)

    @property
    def steps(self) -> int:
        """Calls of ``torch_xla.sync()``; ``xm.mark_step()`` and ``torch_xla.step()`` make one."""
        return self.counters.get("MarkStep", 0)

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often each operation ran on the host for want of an XLA version, most often first."""
        found = {
            name.removeprefix("aten::"): value
            for name, value in self.counters.items()
            if name.startswith("aten::") and name != SCALAR_READ
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def scalar_reads(self) -> int:
        """Values fetched one by one, as ``.item()`` and ``if tensor:`` do."""
        return self.counters.get(SCALAR_READ, 0)

    @property
    def host_reads(self) -> int:
        """All reads: single values, and tensors that came to the host (``.cpu()``, ``print``)."""
        # A fallback, and so a single value, fetches its inputs through `_to_cpu`.
        inputs = self.counters.get("xla::_to_cpu", 0)
        tensors = self._metric("TransferFromDeviceTime").samples - inputs
        return self.scalar_reads + max(0, tensors)

    @property
    def to_device(self) -> Transfers:
        """Host to device."""
        time, data = self._metric("TransferToDeviceTime"), self._metric("OutboundData")
        return Transfers(max(time.samples, data.samples), time.total, data.total)

    @property
    def from_device(self) -> Transfers:
        """Device to host; its seconds hold the wait for the program that computes the value."""
        time, data = self._metric("TransferFromDeviceTime"), self._metric("InboundData")
        return Transfers(max(time.samples, data.samples), time.total, data.total)

    def brief(self) -> Counters:
        """What a training log keeps."""
        return Counters(self.compilations, sum(self.fallbacks.values()), self.scalar_reads)


def now() -> Counts:
    """torch_xla's own counters and metrics, as totals since the process started."""
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
    """The numbers in a ``metrics_report()`` or ``short_metrics_report()`` text.

    A text that begins or ends in the middle gives what it has.

    Raises:
        NoMetrics: it has nothing.
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
    """``"01m03s456ms789.012us"`` → seconds, ``"1.21GB"`` → bytes, ``"376.00"`` → a number.

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
        # torch_xla rounds each part instead of cutting it off: 40.574 ms is 041ms574.000us.
        rounded_up = number and total >= unit / 2
        total += (float(number or 0) - bool(rounded_up)) * unit
    return total


def _sum(values) -> float | None:
    """Their sum, None if one is unknown."""
    values = list(values)
    return None if None in values else sum(values)
