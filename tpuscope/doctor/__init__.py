"""What works on this machine, what does not, and how to mend it: ``mshnet doctor``.

In a notebook::

    from tpuscope.doctor import doctor

    doctor()

Each check is a small function from a :class:`~.machine.Machine` to lines of the report. A device is
tried in a process of its own (:mod:`tpuscope.doctor.probe`). Importing this package needs neither
torch nor torch_xla.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import RequestError
from . import devices, resources, software, storage, variables
from .machine import Machine
from .report import TARGETS, Check, Report, warning

__all__ = ["doctor"]


def doctor(
    require: str | None = None,
    cores: int = 1,
    dataset_dir: str | None = None,
    save_dir: str | None = None,
    compile_cache: str | None = None,
    timeout: float = 120.0,
    log: Callable[[str], None] = print,
    machine: Machine | None = None,
) -> Report:
    """Check this machine, and say the result as a table.

    Args:
        require: what has to work: ``"tpu"``, ``"cuda"``, ``"xla"`` (a TPU, or the CPU through
            XLA) or ``"cpu"``; None: anything that can train.
        cores: that have to be there, of a TPU or virtual ones.
        dataset_dir: data set to check.
        save_dir: folder of a run to check.
        compile_cache: folder of compiled programs to check.
        timeout: seconds for each device to open and compute.
        log: takes the table.
        machine: where to look; this one by default.

    Returns:
        The report; its ``usable`` answers the request.

    Raises:
        RequestError: no such target, or less than one core or second.
    """
    if require not in (None, *TARGETS):
        raise RequestError(f"--require {require}: must be one of {', '.join(TARGETS)}")
    if cores < 1:
        raise RequestError(f"--cores {cores}: must be at least 1")
    if not 0 < timeout < float("inf"):
        raise RequestError(f"--timeout {timeout}: must be a positive number of seconds")
    report = examine(
        machine or Machine(), require, cores, dataset_dir, save_dir, compile_cache, timeout
    )
    log(report.table())
    return report


def examine(
    machine: Machine,
    require: str | None = None,
    cores: int = 1,
    dataset_dir: str | None = None,
    save_dir: str | None = None,
    compile_cache: str | None = None,
    timeout: float = 120.0,
) -> Report:
    """The checks behind :func:`doctor`, with the same arguments; says nothing."""
    report = Report(require=require, cores=cores)
    with _status_line() as show, ThreadPoolExecutor(1) as background:

        def add(name: str, look: Callable[[], Check | list[Check] | None]) -> None:
            show(name)
            try:
                found = look()
            except ImportError as error:
                fix = "mend what is said of the packages, then look again"
                found = warning(name, f"not looked at: {error}", fix)
            except Exception as error:  # a check that fails says so, and the others go on
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                found = warning(name, f"this check failed itself: {text}", "please report it")
            report.checks.extend([found] if isinstance(found, Check) else found or [])

        def watch(stage: str) -> None:
            show(f"devices: {stage}")

        add("Python", lambda: software.python(machine))
        add("versions", lambda: software.versions(machine, require))
        add("neighbours", lambda: software.neighbours(machine))
        # Two processes at a time: this one imports packages while the others try the devices.
        importing = background.submit(software.imports, machine, timeout)
        add("runtime", lambda: devices.place(machine, require))
        add("TPU driver", lambda: devices.driver(machine))
        add("environment variables", lambda: variables.variables(machine))
        blocked = {target for check in report.checks for target in check.blocks}
        known: dict = {}

        def processor() -> list[Check]:
            checks, works, facts = devices.processor(machine, timeout, watch)
            known.update(facts)
            report.works |= works
            return checks

        def accelerator(look: Callable) -> list[Check]:
            checks, works = look()
            report.works |= works
            return checks

        if machine.version("torch"):
            add("CPU", processor)
            add(
                "CUDA",
                lambda: accelerator(lambda: devices.cuda(machine, known, timeout, watch, require)),
            )
            # Versions that do not match, or a TPU that another process holds: said already.
            if machine.version("torch_xla") and "xla" not in blocked:
                add("XLA", lambda: accelerator(lambda: devices.xla(machine, timeout, watch)))
        add("imports", importing.result)
        add("memory", lambda: resources.memory(machine))
        add("loader", lambda: resources.loader(machine))
        add("shared memory", lambda: resources.shared_memory(machine))
        add("disk", lambda: resources.disks(machine, save_dir))
        add("Drive", lambda: storage.drive(machine))
        add("data set", lambda: storage.data_set(dataset_dir))
        add("compile cache", lambda: storage.compile_cache(compile_cache, "tpu" in report.works))
        add("run folder", lambda: storage.run_folder(save_dir))
    report.facts = _facts(machine, known, report)
    return report


def _facts(machine: Machine, known: dict, report: Report) -> dict:
    """Plain values of the machine, for ``--json``."""

    def value(look: Callable[[], Any]) -> Any:
        try:
            return look()
        except Exception:  # the checks have said it
            return None

    memory = value(machine.memory) or (None, None)
    total, free = (size and round(size / 1e9, 1) for size in memory)
    return {
        "runtime": value(machine.place),
        "python": machine.python,
        "versions": {name: machine.version(name) for name in software.SHOWN},
        "cuda_build": known.get("cuda_build"),
        "gpus": known.get("gpus") or [],
        "tpu_chips": value(lambda: len(machine.chips())),
        "tpu_cores": value(machine.tpu_cores),
        "cpus": machine.cpus(),
        "memory_gb": total,
        "memory_free_gb": free,
        "works": report.works,
    }


@contextlib.contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """One line for people who watch, with the check that goes on; gone at the end."""
    try:
        from tqdm import tqdm

        from ..progress import someone_watches
    except ImportError:  # what is missing is about to be said
        yield lambda text: None
        return
    with tqdm(bar_format="{elapsed} {desc}", leave=False, disable=not someone_watches()) as line:
        yield line.set_description_str
