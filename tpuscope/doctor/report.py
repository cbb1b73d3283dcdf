"""What a check says, and all of them together."""

from dataclasses import dataclass, field
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"

# What can be asked for, best first. "xla" is XLA on whatever there is: a TPU, or the CPU.
TARGETS = ("tpu", "cuda", "xla", "cpu")


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        name: of what was looked at.
        status: ``OK``, ``WARNING`` or ``PROBLEM``.
        detail: what was found.
        fix: what to type or click; empty where nothing needs to change.
        blocks: the targets on which training cannot run because of it.
    """

    name: str
    status: str
    detail: str
    fix: str = ""
    blocks: tuple[str, ...] = ()


def ok(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, OK, detail, fix)


def warning(name: str, detail: str, fix: str) -> Check:
    return Check(name, WARNING, detail, fix)


def problem(name: str, detail: str, fix: str, blocks: tuple[str, ...] = TARGETS) -> Check:
    return Check(name, PROBLEM, detail, fix, blocks)


def refused(name: str, error: Exception, blocks: tuple[str, ...] = TARGETS) -> Check:
    """From an exception whose message says what is wrong, then after a semicolon what to do."""
    detail, _, fix = " ".join(str(error).split()).partition("; ")
    return problem(name, detail, fix, blocks)


@dataclass(repr=False)
class Report:
    """All checks of a machine.

    Attributes:
        checks: in the order to show them.
        works: target → cores that can train there, of those that computed the right thing.
        facts: of the machine, plain values.
        require: the target asked for, or None for any.
        cores: asked for.
    """

    checks: list[Check] = field(default_factory=list)
    works: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    require: str | None = None
    cores: int = 1

    @property
    def targets(self) -> list[str]:
        """Where training can run, with the cores asked for; best first."""
        blocked = {target for check in self.checks for target in check.blocks}
        return [t for t in TARGETS if self.works.get(t, 0) >= self.cores and t not in blocked]

    @property
    def usable(self) -> bool:
        """Whether what was asked for is there."""
        return self.require in self.targets if self.require else bool(self.targets)

    def verdict(self) -> str:
        """The last line."""
        asked = [f"--require {self.require}"] if self.require else []
        asked += [f"--cores {self.cores}"] if self.cores > 1 else []
        wanted = f" for {' '.join(asked)}" if asked else ""
        there = "training can run on " + ", ".join(self.targets)
        if not self.usable:
            rest = there if self.targets else "nothing here can train"
            return f"not usable{wanted}: {self._reason()}; {rest}"
        counts = {s: sum(check.status == s for check in self.checks) for s in (PROBLEM, WARNING)}
        noted = [f"{n} {s}{'s' * (n > 1)}" for s, n in counts.items() if n]
        return f"usable{wanted}: {there}" + (f" ({', '.join(noted)} above)" if noted else "")

    def _reason(self) -> str:
        """Why it is not usable: the first check that blocks all that would do, or the cores."""
        wanted = {self.require} if self.require else set(TARGETS)
        for blocked in (wanted, wanted & {"cpu"}):  # of all targets the CPU is the last resort
            for check in self.checks:
                if blocked and blocked <= set(check.blocks):
                    return f"{check.name}, {check.detail.rstrip('.')}"
        cores = max((self.works.get(target, 0) for target in wanted), default=0)
        return f"at most {cores} core{'s' * (cores != 1)} can be had"

    def table(self) -> str:
        """For people: a line a check, its fix below it, the verdict at the end."""
        name_width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:<8} {check.name:<{name_width}}  {check.detail}")
            if check.fix:
                lines.append(f"{'':<8} {'':<{name_width}}  → {check.fix}")
        return "\n".join([*lines, "", self.verdict()])

    def as_dict(self) -> dict:
        """Plain values for ``--json``."""
        fields = ("name", "status", "detail", "fix")
        return {
            "usable": self.usable,
            "verdict": self.verdict(),
            "targets": self.targets,
            "checks": [{name: getattr(check, name) for name in fields} for check in self.checks],
            "environment": self.facts,
        }

    def __repr__(self) -> str:
        return self.verdict()
