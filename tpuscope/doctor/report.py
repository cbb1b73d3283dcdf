"""Lines of the report, and the verdict over all of them."""

from dataclasses import dataclass, field
from typing import Any

from ..tables import table

OK, WARNING, PROBLEM = "ok", "warning", "problem"

# What can be required, best first. "xla" is XLA on a TPU if there is one, else on the CPU.
TARGETS = ("tpu", "cuda", "xla", "cpu")


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: of what was checked.
        status: ``OK``, ``WARNING`` or ``PROBLEM``.
        detail: what was found.
        fix: what to type or click; empty where nothing needs to change.
        blocks: the targets that cannot be used because of it.
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
    """Return a problem from an exception: the fault, a semicolon, the fix."""
    detail, _, fix = " ".join(str(error).split()).partition("; ")
    return problem(name, detail, fix, blocks)


@dataclass(repr=False)
class Report:
    """All checks of a machine.

    Attributes:
        checks: in the order to show them.
        works: target → its cores, of devices that computed the right result.
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
        """Targets that can be used with the cores asked for; best first."""
        blocked = {target for check in self.checks for target in check.blocks}
        return [t for t in TARGETS if self.works.get(t, 0) >= self.cores and t not in blocked]

    @property
    def usable(self) -> bool:
        """Whether what was required works."""
        return self.require in self.targets if self.require else bool(self.targets)

    def verdict(self) -> str:
        """Return the last line."""
        asked = [f"--require {self.require}"] if self.require else []
        asked += [f"--cores {self.cores}"] if self.cores > 1 else []
        wanted = f" for {' '.join(asked)}" if asked else ""
        there = "training can run on " + ", ".join(self.targets)
        if not self.usable:
            rest = there if self.targets else "no device here works"
            return f"not usable{wanted}: {self._reason()}; {rest}"
        counts = {s: sum(check.status == s for check in self.checks) for s in (PROBLEM, WARNING)}
        noted = [f"{n} {s}{'s' * (n > 1)}" for s, n in counts.items() if n]
        return f"usable{wanted}: {there}" + (f" ({', '.join(noted)} above)" if noted else "")

    def _reason(self) -> str:
        """Return why it is not usable: the first check that blocks every target, or the cores."""
        wanted = {self.require} if self.require else set(TARGETS)
        for blocked in (wanted, wanted & {"cpu"}):  # of all targets the CPU is the last resort
            for check in self.checks:
                if blocked and blocked <= set(check.blocks):
                    return f"{check.name}, {check.detail.rstrip('.')}"
        cores = max((self.works.get(target, 0) for target in wanted), default=0)
        return f"at most {cores} core{'s' * (cores != 1)} can be used"

    def table(self) -> str:
        """Return the report for people: a line a check, its fix below it, the verdict last."""
        rows = []
        for check in self.checks:
            rows.append((check.status, check.name, check.detail))
            if check.fix:
                rows.append(("", "", f"→ {check.fix}"))
        return f"{table(rows)}\n\n{self.verdict()}"

    def as_dict(self) -> dict:
        """Return plain values for ``--json``."""
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
