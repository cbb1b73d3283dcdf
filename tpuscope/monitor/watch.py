"""See through torch_xla: what was compiled and why, what ran on the host, what was read, and where.

On any model, in three lines::

    from tpuscope.monitor.watch import watch

    with watch() as w:
        for batch in loader:
            step(batch)
            torch_xla.sync()
    print(w.report())

``from_text`` makes the same report, as far as it goes, of a ``metrics_report()`` that somebody
pasted; ``timeline`` draws the steps.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine import _private, metrics
from ..engine import torch_xla as runtime
from ..engine.lines import Line, caller
from ..engine.metrics import EXECUTE, NoMetrics
from .calls import Graph
from .recompile_reasons import differences
from .recorder import Recorder
from .report import Report, Step
from .timeline import timeline

__all__ = [
    "Budget",
    "BudgetExceeded",
    "NoMetrics",
    "Report",
    "Step",
    "Watch",
    "compare",
    "from_text",
    "timeline",
    "watch",
]


class BudgetExceeded(RuntimeError):
    """A watched block did more than it was allowed; the message says what, where and why."""


@dataclass(frozen=True)
class Budget:
    """What a block may do at most; None is no limit.

    Attributes:
        compilations: programs compiled.
        fallbacks: operations run on the host for want of an XLA version.
        host_reads: values and tensors that the host has fetched.
    """

    compilations: int | None = None
    fallbacks: int | None = None
    host_reads: int | None = None

    def check(self, report: Report) -> None:
        """Hold a report against the limits.

        Raises:
            BudgetExceeded: names each number that is too large, and its cause.
        """
        over = []
        for name, words in (
            ("compilations", "compilations"),
            ("fallbacks", "host fallbacks"),
            ("host_reads", "host reads"),
        ):
            limit, found = getattr(self, name), getattr(report, name)
            if limit is not None and found > limit:
                over.append(f"{found} {words}, {limit} allowed: {report.reason(name)}")
        if over:
            raise BudgetExceeded("; ".join(over))


class Watch:
    """A block that is being watched, and what it has done; made by :func:`watch`.

    Attributes:
        steps: one record for each sync, in order; ``steps[0]`` is step 1.
    """

    def __init__(self, explain: bool = True, budget: Budget | None = None):
        self.steps: list[Step] = []
        self._budget = budget
        self._explain = explain
        self._recorder: Recorder | None = None
        self._closing = contextlib.ExitStack()
        self._report: Report | None = None

    def __enter__(self) -> "Watch":
        runtime.require_matching_versions()
        _wait_for_device()  # what was launched before is not counted
        self._closing.enter_context(_private.observed_steps(self._sync))
        self._closing.callback(_watch_optimizers(self._optimizer_stepped).remove)
        self._optimizers: dict[int, int] = {}  # updates in this step, by optimizer
        if self._explain:
            self._recorder = self._closing.enter_context(Recorder())
        self._before = self._step_before = metrics.now()
        self._executions: list[tuple[float, float]] = []  # start, seconds
        self._executed = {name: _samples(name, 0)[0] for name in EXECUTE}
        self._began = self._step_began = time.time()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        ended = time.time()
        self._closing.close()
        if error is None:
            _wait_for_device()  # so that what was launched is counted, and timed
        self._collect_executions()
        self._report = self._make_report(ended - self._began)
        if self._budget and error is None:
            self._budget.check(self._report)

    def report(self) -> Report:
        """What the block has done; inside of it, what it has done so far."""
        return self._report or self._make_report(time.time() - self._began)

    def _make_report(self, seconds: float) -> Report:
        recorder = self._recorder
        self._place_executions()
        return Report(
            counts=metrics.now() - self._before if self._report is None else self._report.counts,
            seconds=seconds,
            steps=self.steps,
            explained=recorder is not None,
            events=recorder.events if recorder else [],
            compiled=recorder.compiled if recorder else [],
            graphs=list(recorder.graphs.values()) if recorder else [],
            pending_updates=max(self._optimizers.values(), default=0),
        )

    def _sync(self, original: Callable, args: tuple, kwargs: dict) -> None:
        """In place of torch_xla's own end of a step."""
        line = caller(sys._getframe(1))
        launched = time.time()
        try:
            return original(*args, **kwargs)
        finally:
            self._end_step(line, launched)

    def _end_step(self, line: Line | None, launched: float) -> None:
        ended, now = time.time(), metrics.now()
        did = now - self._step_before
        if not any(did.cache) and not did.repeated:
            return  # nothing was pending: the loaders sync as well, before each batch
        graph = None
        if self._recorder and any(did.cache):
            inside = sum(c.count for c in self._recorder.compiled if c.step == self._recorder.step)
            graph = self._recorder.end_step(line, did.cache[1] - inside)
        # Only totals of a pasted report may be unknown.
        wait = did.metrics.get("DeviceLockWait", metrics.Metric()).total or 0.0
        self.steps.append(
            Step(
                number=len(self.steps) + 1,
                line=line,
                began=self._step_began,
                launched=launched,
                seconds=ended - self._step_began,
                compilations=did.compilations,
                compile_seconds=did.compile_seconds or 0.0,
                wait_seconds=wait + (did.from_device.seconds or 0.0),
                execute_seconds=0.0,
                programs=max(sum(did.cache), did.repeated),
                fallbacks=sum(did.fallbacks.values()),
                host_reads=did.host_reads,
                updates=max(self._optimizers.values(), default=0),
                graph=graph,
            )
        )
        self._optimizers.clear()
        self._collect_executions()
        self._step_began, self._step_before = ended, now

    def _optimizer_stepped(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        self._optimizers[id(optimizer)] = self._optimizers.get(id(optimizer), 0) + 1

    def _collect_executions(self) -> None:
        """torch_xla keeps the last samples only, so they are taken after every step."""
        for name, seen in self._executed.items():
            self._executed[name], samples = _samples(name, seen)
            self._executions += samples

    def _place_executions(self) -> None:
        """Give each execution to its step: they start in turn, as many as the step asked for."""
        executions = iter(sorted(self._executions))
        for step in self.steps:
            took = itertools.islice(executions, step.programs)
            step.execute_seconds = sum(seconds for _, seconds in took)


def watch(explain: bool = True, budget: Budget | None = None) -> Watch:
    """Watch a block of code that computes on XLA.

    Args:
        explain: also record every PyTorch call with its line, which is what names the cause of a
            compilation and the line of a fallback or read. On the host a step then takes about
            twice as long (a small U-Net, 1,400 calls a step, a 2-core CPU); without it the
            difference was not measurable there.
        budget: limits that are checked at the end of the block.

    Returns:
        A context manager; ``report()`` of what ``as`` gives is a :class:`Report`. At both ends of
        the block it waits for the device. Blocks may be nested, and each can be used once.

    Raises:
        XlaUnavailable: torch_xla is not installed.
        BudgetExceeded: at the end of the block, unless it ends with another exception.
    """
    return Watch(explain, budget)


def from_text(text: str) -> Report:
    """The report on a pasted ``metrics_report()`` of any run, on any device.

    Such a text knows no steps, lines and causes.

    Raises:
        NoMetrics: there is nothing of a metrics report in it.
    """
    return Report(counts=metrics.parse(text))


def compare(a: Step | Report, b: Step | Report) -> str:
    """A table of what differs between two steps, or between two reports.

    For steps of one explained watch also how their calls differ.
    """
    rows = [("", *(one.title for one in (a, b)))]
    left, right = a.numbers(), b.numbers()
    for name in left:
        if left[name] != right[name]:
            rows.append((name, left[name], right[name]))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    if isinstance(a, Step) and isinstance(b, Step):
        lines += _call_differences(a.graph, b.graph)
    return "\n".join(lines)


def _call_differences(a: Graph | None, b: Graph | None, most: int = 5) -> list[str]:
    if a is None or b is None:
        return []
    if a is b:
        return ["the calls of both are the same"]
    if a.calls is None or b.calls is None:
        return ["the calls of one of them are no longer kept"]
    found = list(differences(a, b))
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return [f"{cause}" for cause in found[:most]] + more


def _watch_optimizers(hook: Callable) -> Any:
    """Call the hook after every step of every optimizer; its handle removes it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(hook)


def _wait_for_device() -> None:
    if runtime.is_open():
        runtime.wait()


def _samples(name: str, seen: int) -> tuple[int, list[tuple[float, float]]]:
    """How many samples a time has, and (start, seconds) of those that are new."""
    import torch_xla.debug.metrics as met

    data = met.metric_data(name)
    if not data:
        return 0, []
    count, _, samples = data
    new = samples[max(0, len(samples) - (count - seen)) :] if count > seen else ()
    return count, [(end - value * 1e-9, value * 1e-9) for end, value in new]
