"""The report of a watched block: counts as a table, and verdicts that say what to change."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..engine.lines import Line
from ..engine.metrics import Counts, Transfers
from ..tables import table
from . import recompile_reasons
from .calls import Graph
from .recompile_reasons import Cause
from .recorder import Compiled, Event

_SHOWN = 5  # steps, lines or graphs that a row or sentence names
_KINDS = 4  # computations that one program may well have: phases of training, evaluation


@dataclass
class Step:
    """One step: from the end of the one before (or the start of the block) to the end of its sync.

    Attributes:
        number: from 1.
        line: of the sync.
        began: when, in seconds since the epoch.
        launched: when the sync was called, on the same clock.
        seconds: of the host, from ``began`` to the end of the sync.
        compilations: programs compiled.
        compile_seconds: for them.
        wait_seconds: the host was blocked: it waited for the device's previous work to be taken
            (torch_xla's DeviceLockWait) or for a value (TransferFromDeviceTime).
        execute_seconds: of the programs that this step launched, from launch to end. They run
            in parallel to the host, so this is no part of ``seconds``.
        programs: programs launched; 1 unless something cut the graph.
        fallbacks: operations that ran on the host.
        host_reads: values and tensors fetched.
        updates: calls of ``step()`` of the same optimizer.
        graph: what was run, None unless the watch explains.
    """

    number: int
    line: Line | None
    began: float
    launched: float
    seconds: float
    compilations: int
    compile_seconds: float
    wait_seconds: float
    execute_seconds: float
    programs: int
    fallbacks: int
    host_reads: int
    updates: int = 0
    graph: Graph | None = None

    @property
    def trace_seconds(self) -> float:
        """Return the rest of the host's time: data, Python, tracing, launching."""
        return max(0.0, self.seconds - self.compile_seconds - self.wait_seconds)

    @property
    def title(self) -> str:
        """Return the title for a table's head."""
        return f"step {self.number}"

    def numbers(self) -> dict[str, str]:
        """Return what can be compared, for people."""
        return {
            "programs run": str(self.programs),
            "compilations": str(self.compilations),
            "compiling": _seconds(self.compile_seconds),
            "tracing and the rest": _seconds(self.trace_seconds),
            "waiting": _seconds(self.wait_seconds),
            "on the device": _seconds(self.execute_seconds),
            "host fallbacks": str(self.fallbacks),
            "host reads": str(self.host_reads),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = {k: v for k, v in vars(self).items() if k not in ("line", "graph")}
        line = str(self.line) if self.line else None
        return values | {"trace_seconds": self.trace_seconds, "line": line}


@dataclass
class Report:
    """Numbers, table and verdicts of a watched block or of a pasted text; ``print`` it.

    Attributes:
        counts: torch_xla's own.
        seconds: of the block; None for a text.
        steps: in order; None for a text.
        explained: whether calls were recorded, so that lines and causes are known.
        events: fallbacks and reads.
        compiled: what was compiled, and why.
        graphs: what was run.
        pending_updates: calls of ``step()`` of one optimizer after the last sync.
    """

    counts: Counts
    seconds: float | None = None
    steps: list[Step] | None = None
    explained: bool = False
    events: list[Event] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    pending_updates: int = 0

    @property
    def title(self) -> str:
        """Return the title for a table's head."""
        return _count(self._steps, "step")

    @property
    def compilations(self) -> int:
        """Return how many programs were compiled."""
        return self.counts.compilations

    @property
    def fallbacks(self) -> int:
        """Return how many operations ran on the host because XLA has no version of them."""
        return sum(self.counts.fallbacks.values())

    @property
    def host_reads(self) -> int:
        """Return how many values and tensors the host has fetched."""
        return self.counts.host_reads

    @property
    def _steps(self) -> int:
        return self.counts.steps if self.steps is None else len(self.steps)

    @property
    def verdicts(self) -> list[str]:
        """Return what to change, the most important first; one line if nothing."""
        found = [
            *self._missing_sync(),
            *self._fallbacks(),
            *self._recompilations(),
            *self._cuts(),
            *self._reads(),
        ]
        return found or [self._fine()]

    @property
    def fine(self) -> bool:
        """Return whether there is nothing to change."""
        return self.verdicts == [self._fine()]

    def reason(self, name: str) -> str:
        """Return the verdict about ``"compilations"``, ``"fallbacks"`` or ``"host_reads"``."""
        finders: dict[str, tuple[Callable[[], Iterable[str]], ...]] = {
            "compilations": (self._missing_sync, self._recompilations, self._fallbacks, self._cuts),
            "fallbacks": (self._fallbacks,),
            "host_reads": (self._cuts, self._reads),
        }
        for finder in finders[name]:
            for sentence in finder():
                return sentence
        if name == "compilations" and self.compiled:
            return "; ".join(f"in step {c.step} {c.cause}" for c in self.compiled[:_SHOWN])
        if name == "host_reads" and self._of("read"):
            return _places(self._of("read"))
        return "watch(explain=True) says more"

    # -- sentences ---------------------------------------------------------------------------------

    def _missing_sync(self) -> Iterable[str]:
        advice = "Call torch_xla.sync() after each optimizer.step()."
        if self.steps is None:
            return
        twice = next((step for step in self.steps if step.updates > 1), None)
        if self.pending_updates > 1 or (not self.steps and self._recorded):
            what = (
                f"{self.pending_updates} updates of one optimizer"
                if self.pending_updates > 1
                else _count(self._recorded, "operation")
            )
            since = "in the block" if not self.steps else f"after step {self._steps}"
            cut = (
                f" Only reads cut it, and {_count(self.compilations, 'program')} had to be "
                "compiled for them, because each begins further back."
                if self.host_reads and self.compilations > 1
                else ""
            )
            yield f"No sync {since}, though {what} came: the graph only grew.{cut} {advice}"
        elif twice:
            yield (
                f"Step {twice.number} holds {twice.updates} updates of one optimizer as one graph, "
                f"up to {_at(twice.line)}. {advice}"
            )

    @property
    def _recorded(self) -> int:
        """Return how many operations torch_xla has traced."""
        return sum(v for name, v in self.counts.counters.items() if name.startswith("xla::"))

    def _fallbacks(self) -> Iterable[str]:
        for name, number in self.counts.fallbacks.items():
            mine = [e for e in self._of("fallback") if e.name == name]
            where = f", from {_places(mine)}" if any(e.line for e in mine) else ""
            where += " (the forward line)" if where and any(e.backward for e in mine) else ""
            where += " in backward" if mine and not where and mine[0].backward else ""
            rate = f" ({number / len(self.steps):.3g} a step)" if self.steps else ""
            programs = sum(
                c.count for c in self.compiled if c.trigger == "fallback" and c.operation == name
            )
            cost = f" ({_count(programs, 'compilation')})" if programs else ""
            yield (
                f"{name} ran on the host {_count(number, 'time')}{rate}{where}: XLA has no version "
                f"of it on this device, so the graph is cut there{cost}, and its tensors travel to "
                "the host and back. Write it with operations that XLA has, or move it out of the "
                "step."
            )

    def _recompilations(self) -> Iterable[str]:
        if any(True for _ in self._missing_sync()):
            return
        if not self.explained:
            yield from self._recompilations_by_count()
            return
        avoidable = [c for c in self.compiled if c.cause.kind in _FIX]
        groups: dict[tuple, list[Compiled]] = {}
        for one in avoidable:
            groups.setdefault((one.cause.kind, one.cause.line, one.cause.what), []).append(one)
        first = [c for c in self.compiled if c.cause.kind == recompile_reasons.FIRST]
        needed = sum(c.count for c in first)
        if needed > _KINDS:
            steps = _few(str(c.step) for c in first)
            yield (
                f"{needed} computations with little in common were compiled, in steps {steps}: "
                "training and evaluation are two, and a phase of its own is one more. Let the "
                "others do the same operations on the same shapes."
            )
        begin = f"{_count(self.compilations, 'compilation')} where {needed} would do: "
        for group in sorted(groups.values(), key=len, reverse=True):
            cause = group[0].cause
            steps = f"at step {group[0].step}"
            if len(group) > 1:
                others = _few(str(one.cause.new) for one in group[1:])
                steps += f" (then {others}; {len(group)} compilations)"
            yield _sentence(f"{begin}{cause} {steps}: {_FIX[cause.kind](cause)}")
            begin = ""

    def _recompilations_by_count(self) -> Iterable[str]:
        found, missed = self.counts.cache
        if missed <= 3 or missed * 4 < found:
            return
        after = [step.number for step in self.steps or [] if step.compilations]
        where = f", in steps {_few(map(str, after))}" if after else ""
        yield (
            f"{missed} of {found + missed} programs were new when they were run{where}: a shape, a "
            "Python number or the operations change from step to step. watch(explain=True) names "
            "what."
        )

    def _cuts(self) -> Iterable[str]:
        cuts = [e for e in self._of("read") if e.cut]
        if cuts:
            yield (
                f"{_count(len(cuts), 'read')} cut the graph, {_places(cuts)}: what was pending had "
                "to be run for the value, and what the step needs of it is computed again. Read "
                "after torch_xla.sync(), and not in every step."
            )
        elif not self.explained and self.steps:
            extra = sum(step.programs - 1 for step in self.steps if not step.fallbacks)
            if extra > 0 and self.host_reads:
                yield (
                    f"{_count(extra, 'program')} ran before the step's end, in steps with host "
                    "reads: read after torch_xla.sync(). watch(explain=True) says where."
                )

    def _reads(self) -> Iterable[str]:
        advice = (
            "each makes the host wait for the device. Add up on the device, and read every tenth "
            "step or once an epoch."
        )
        often = max(3, self._steps / 2)
        if self.explained:
            reads = [e for e in self._of("read") if not e.cut]
            steps = Counter(line for line, _ in {(e.line, e.step) for e in reads})
            seen = [e for e in reads if e.line and steps[e.line] >= often]
            if seen:
                number = max(steps[e.line] for e in seen)
                yield f"Host reads in {number} of {self._steps} steps, {_places(seen)}: {advice}"
            if steps[None] >= often:
                number = sum(e.line is None for e in reads)
                yield (
                    f"Host reads in {steps[None]} of {self._steps} steps ({number} reads) that no "
                    "line of PyTorch asked for: torch_xla made them, as mark_sharding does for a "
                    "tensor that is on the device already. Give MpDeviceLoader an input_sharding, "
                    "or mark tensors directly after .to(device)."
                )
        elif self.steps:
            number = sum(step.host_reads > 0 for step in self.steps)
            if number >= often:
                yield f"Host reads in {number} of {self._steps} steps: {advice}"
        elif self.host_reads >= often and self._steps:
            yield f"{self.host_reads} host reads in {_count(self._steps, 'sync')}: {advice}"

    def _fine(self) -> str:
        if not self.counts.counters:
            return "Nothing ran on XLA."
        return (
            f"Fine: {_count(self._steps, 'step')}, {_count(self.compilations, 'compilation')}, "
            f"no host fallback, {_count(self.host_reads, 'host read')}."
        )

    def _of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    # -- table -------------------------------------------------------------------------------------

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the table's rows: what, how much, and more about it."""
        c = self.counts
        after = [step.number for step in self.steps or [] if step.compilations]
        took = "" if self.seconds is None else f"in {_seconds(self.seconds)}"
        steps = f"in step {_few(map(str, after))}" if after else ""
        waited = sum(step.wait_seconds for step in self.steps or [])
        fallen = _few(f"{name} ×{times}" for name, times in c.fallbacks.items())
        device = f"{_seconds(c.execute_seconds)} on the device"
        rows = [
            ("syncs" if self.steps is None else "steps", str(self._steps), took),
            ("compilations", str(c.compilations), _join(_seconds(c.compile_seconds), steps)),
            ("programs run", str(c.executions), _join(device, self._per_step())),
            self._tracing(),
            *([("waiting", _seconds(waited), "for the device, at a sync or read")] * bool(waited)),
            ("host fallbacks", str(self.fallbacks), fallen),
            ("host reads", str(self.host_reads), _places(self._of("read"))),
            ("to the device", *_transfer(c.to_device)),
            ("from the device", *_transfer(c.from_device)),
            ("program cache", *_cache(c.cache)),
            ("cache on disk", *_cache(c.persistent_cache)),
        ]
        synced = [graph for graph in self.graphs if graph.trigger == "sync"]
        for graph in synced[:_SHOWN]:
            rows.append((f"graph of step {graph.step}", f"{graph.runs} ×", _inputs(graph)))
        if len(synced) > _SHOWN:
            rows.append(("other graphs", str(len(synced) - _SHOWN), ""))
        return rows

    def _tracing(self) -> tuple[str, str, str]:
        if self.steps:
            traced = sum(step.trace_seconds for step in self.steps)
            return "tracing", _seconds(traced), "data, Python, recording operations"
        inside = _seconds(self.counts.tracing_seconds)
        return "tracing", inside, "in torch_xla; fallbacks and reads are in it"

    def _per_step(self) -> str:
        if not self.steps:
            return ""
        return f"{sum(step.programs for step in self.steps) / len(self.steps):.3g} a step"

    def numbers(self) -> dict[str, str]:
        """Return what can be compared, for people."""
        return {what: _join(much, more) for what, much, more in self.rows()}

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as values that JSON has."""
        return {
            "seconds": self.seconds,
            "compilations": self.compilations,
            "fallbacks": self.fallbacks,
            "host_reads": self.host_reads,
            "verdicts": self.verdicts,
            "causes": [
                {"step": c.step, "count": c.count, "kind": c.cause.kind, "cause": str(c.cause)}
                for c in self.compiled
            ],
            "events": [{**asdict(e), "line": str(e.line) if e.line else None} for e in self.events],
            "steps": [step.to_dict() for step in self.steps or []],
            "counters": self.counts.counters,
            "metrics": {name: asdict(metric) for name, metric in self.counts.metrics.items()},
        }

    def __str__(self) -> str:
        rows = table(self.rows(), "<><")
        verdicts = self.verdicts
        if not self.fine:
            verdicts = [f"{i}. {text}" for i, text in enumerate(verdicts, 1)]
        return "\n".join([rows, "", *verdicts])


# -- what to do about a cause ----------------------------------------------------------------------


def _fix_shape(cause: Cause) -> str:
    old, new = (text.strip("()").split(",", 1) for text in (cause.old, cause.new))
    if old[0] != new[0] and old[1:] == new[1:]:
        return "pad or drop the last batch (drop_last=True), so that every batch has one size."
    return "resize, crop or pad to one shape, or to a few."


def _fix_value(cause: Cause) -> str:
    try:
        whole = str(int(cause.new)) == cause.new
    except ValueError:
        whole = False
    if whole:
        return (
            "the value decides on shapes or operations. Keep to a few values, or to one shape, and "
            "hand over as data what differs, for example a mask."
        )
    return (
        "the value is a part of the program. Hand a number over as data, torch.tensor([value]) "
        "made on the host and moved to the device, or keep to a few values."
    )


def _fix_constant(cause: Cause) -> str:
    return (
        "torch_xla makes a 0 or 1 without dimensions, and what has not run yet, a part of the "
        "first graph. Give it one dimension and upload it from the host, or call torch_xla.sync() "
        "before the loop; batch norm's num_batches_tracked can stay on the host."
    )


def _fix_state(cause: Cause) -> str:
    return (
        "modules and optimizers make state in their first step. Make it on the host and upload it "
        "before the loop, or pay one compilation, once."
    )


_FIX: dict[str, Callable[[Cause], str]] = {
    recompile_reasons.SHAPE: _fix_shape,
    recompile_reasons.DTYPE: lambda cause: "convert it to one dtype before the step.",
    recompile_reasons.CONSTANT: _fix_constant,
    recompile_reasons.STATE: _fix_state,
    recompile_reasons.FIRST_STEP: _fix_state,
    recompile_reasons.OPERATIONS: lambda cause: (
        "a Python branch or loop went another way. Let both ways do the same operations "
        "(torch.where), or keep to a few ways."
    ),
    recompile_reasons.VALUE: _fix_value,
    recompile_reasons.NUMBER: _fix_value,
    recompile_reasons.RESULT: lambda cause: (
        "autocast or grad mode was another: keep them the same."
    ),
    recompile_reasons.UNKNOWN: lambda cause: "look at what the step leaves behind.",
}


# -- words -----------------------------------------------------------------------------------------


def _places(events: list[Event]) -> str:
    """Return the lines of events with how often each occurred, the most frequent first."""
    lines = Counter(event.line for event in events if event.line)
    return _few((line.quoted() + f" ×{n}" * (n > 1) for line, n in lines.most_common()), 3)


def _few(words: Iterable[str], most: int = _SHOWN) -> str:
    words = list(words)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _at(line: Line | None) -> str:
    return line.quoted() if line else "the next sync"


def _inputs(graph: Graph) -> str:
    """Return a graph's new data; the first step's is the whole model, and only counted."""
    if len(graph.inputs) <= _SHOWN:
        inputs = "; ".join(str(array) for array in graph.inputs)
    else:
        inputs = _count(len(graph.inputs), "input")
    again = f"compiled {graph.compiled} times" if graph.compiled > 1 else ""
    return _join(inputs, again)


def _cache(cache: tuple[int, int] | None) -> tuple[str, str]:
    if cache is None:
        return "–", "not in use"
    found, missed = cache
    return str(found + missed), f"{_count(found, 'hit')}, {missed} missed"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _join(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _transfer(moved: Transfers) -> tuple[str, str]:
    return str(moved.count), _join(_bytes(moved.bytes), _seconds(moved.seconds))


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return "?"
    for unit in ("B", "KB", "MB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GB"
