"""What works on this machine, what does not, and how to fix it: ``tpuscope doctor``.

In a notebook::

    from tpuscope.doctor import doctor

    doctor()

Each check is a small function from a :class:`~.machine.Machine` to lines of the report. A device is
tried in a process of its own (:mod:`tpuscope.doctor.probe`). Importing this package needs neither
torch nor torch_xla.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import RequestError
from . import devices, resources, software, variables
from .machine import Machine
from .report import TARGETS, Check, Report, warning

__all__ = ["doctor", "examine"]

# What a check returns; one that raises becomes a warning.
Lines = Check | list[Check] | None


def doctor(
    require: str | None = None,
    cores: int = 1,
    compile_cache: str | None = None,
    timeout: float = 120.0,
    packages: Mapping[str, str] = software.NEEDED,
    extra: Sequence[tuple[str, Callable[[Machine], Lines]]] = (),
    log: Callable[[str], None] = print,
    machine: Machine | None = None,
) -> Report:
    """Check this machine, and print the result as a table.

    Args:
        require: what has to work: ``"tpu"``, ``"cuda"``, ``"xla"`` (a TPU, or the CPU through
            XLA) or ``"cpu"``; None: any of them.
        cores: how many the device must have, of a TPU or virtual ones.
        compile_cache: folder of compiled programs to check.
        timeout: seconds for each device to open and compute.
        packages: what must be importable: module → name to install.
        extra: a program's own checks, run last: name, and a function of the machine.
        log: receives the table.
        machine: where to look; this one by default.

    Returns:
        The report; its ``usable`` answers the request.

    Raises:
        RequestError: no such target, or less than one core or second.
    """
    if require not in (None, *TARGETS):
        raise RequestError(f"--require {require}: must be one of {', '.join(TARGETS)}", "range")
    if cores < 1:
        raise RequestError(f"--cores {cores}: must be at least 1", "range")
    if not 0 < timeout < float("inf"):
        raise RequestError(f"--timeout {timeout}: must be a positive number of seconds", "range")
    report = examine(machine or Machine(), require, cores, compile_cache, timeout, packages, extra)
    log(report.table())
    return report


def examine(
    machine: Machine,
    require: str | None = None,
    cores: int = 1,
    compile_cache: str | None = None,
    timeout: float = 120.0,
    packages: Mapping[str, str] = software.NEEDED,
    extra: Sequence[tuple[str, Callable[[Machine], Lines]]] = (),
) -> Report:
    """Run the checks behind :func:`doctor`, with the same arguments; print nothing."""
    report = Report(require=require, cores=cores)
    with _status_line() as show, ThreadPoolExecutor(1) as background:
        add = _Collector(report, show)
        add("Python", lambda: software.python(machine))
        add("versions", lambda: software.versions(machine, require))
        add("neighbours", lambda: software.neighbours(machine))
        # Two processes at a time: this one imports packages while the others try the devices.
        imports = background.submit(software.imports, machine, timeout, packages)
        add("runtime", lambda: devices.place(machine, require))
        add("TPU driver", lambda: devices.driver(machine))
        add("environment variables", lambda: variables.variables(machine))
        known = _try_devices(add, machine, require, timeout)
        add("imports", imports.result)
        add("memory", lambda: resources.memory(machine))
        add("shared memory", lambda: resources.shared_memory(machine))
        add("disk", lambda: resources.disks(machine))
        add("Drive", lambda: resources.drive(machine))
        on_tpu = "tpu" in report.works
        add("compile cache", lambda: resources.compile_cache(compile_cache, on_tpu))
        for name, check in extra:
            add(name, lambda check=check: check(machine))
    report.facts = _facts(machine, known, report)
    return report


class _Collector:
    """Runs one check after another and adds its lines to the report."""

    def __init__(self, report: Report, show: Callable[[str], None]):
        self.report = report
        self.show = show

    def __call__(self, name: str, check: Callable[[], Lines]) -> None:
        self.show(name)
        try:
            found = check()
        except ImportError as error:
            fix = "fix the packages as the lines about them say, then run this again"
            found = warning(name, f"not checked: {error}", fix)
        except Exception as error:  # one check that fails does not stop the others
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found = warning(name, f"this check itself failed: {text}", "please report it")
        self.report.checks.extend([found] if isinstance(found, Check) else found or [])


def _try_devices(add: _Collector, machine: Machine, require: str | None, timeout: float) -> dict:
    """Open CPU, CUDA and XLA, each in its own process; return what torch reported of itself."""
    known: dict = {}
    blocked = {target for check in add.report.checks for target in check.blocks}

    def watch(stage: str) -> None:
        add.show(f"devices: {stage}")

    def note(found: tuple[list[Check], dict[str, int]]) -> list[Check]:
        checks, works = found
        add.report.works |= works
        return checks

    def processor() -> list[Check]:
        checks, works, facts = devices.processor(machine, timeout, watch)
        known.update(facts)
        return note((checks, works))

    if machine.version("torch"):
        add("CPU", processor)
        add("CUDA", lambda: note(devices.cuda(machine, known, timeout, watch, require)))
        # Not with versions that do not match, nor a TPU that another process holds.
        if machine.version("torch_xla") and "xla" not in blocked:
            add("XLA", lambda: note(devices.xla(machine, timeout, watch)))
    return known


def _facts(machine: Machine, known: dict, report: Report) -> dict:
    """Plain values of the machine, for ``--json``."""

    def value(look: Callable[[], Any]) -> Any:
        try:
            return look()
        except Exception:  # a check reports it
            return None

    total, free = value(machine.memory) or (None, None)
    return {
        "runtime": value(machine.place),
        "python": machine.python,
        "versions": {name: machine.version(name) for name in software.SHOWN},
        "cuda_build": known.get("cuda_build"),
        "gpus": known.get("gpus") or [],
        "tpu_chips": value(lambda: len(machine.chips())),
        "tpu_cores": value(machine.tpu_cores),
        "cpus": machine.cpus(),
        "memory_gb": total and round(total / 1e9, 1),
        "memory_free_gb": None if free is None else round(free / 1e9, 1),
        "works": report.works,
    }


@contextlib.contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """Show the check that is running in one line, to a terminal or a notebook only."""
    try:
        from tqdm import tqdm

        from ..progress import someone_watches
    except ImportError:  # the imports check reports it
        yield lambda text: None
        return
    with tqdm(bar_format="{elapsed} {desc}", leave=False, disable=not someone_watches()) as line:
        yield line.set_description_str
