"""Run the lessons as on Colab's TPU runtime: ``python tools/colab.py [--only 01 03] [--keep]``.

``make test`` runs the lessons in the project's own environment, which holds more than Colab does.
Here they run with what Colab's image has (constraints/colab-tpu.txt, Python 3.13), in an empty
folder, and install mshnet themselves. They must not replace torch or its partners: on Colab that
breaks the session.
"""

import argparse
import asyncio
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from outputs import own_warnings, streams

import notebooks

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints" / "colab-tpu.txt"
VENV = ROOT / ".venv-colab"
EXECUTED = ROOT / "build" / "colab"

VERSION = "3.13"
# Also in the image, in versions that are not pinned here; ipykernel runs the cells.
BESIDE_PINS = ("scipy", "pillow", "ipykernel")
# Bound to each other by C++ interfaces, or to the TPU: a lesson must not change them.
GUARDED = ("torch", "torch_xla", "torchvision", "libtpu", "numpy", "jax", "jaxlib")

QUICK_FLAG = "--xla_backend_optimization_level=0"
# Variables of a developer's shell or of `make test` that a Colab session does not have.
NOT_ON_COLAB = re.compile(
    "PJRT_|XLA_|XRT_|TPU_|LIBTPU_|PT_XLA|CPU_NUM_DEVICES|MSHNET_|COLAB_|KAGGLE_"
    "|PYTHON|PYTEST|VIRTUAL_ENV|CONDA_|JUPYTER|IPYTHON|MPL|GIT_|XDG_"
)
CELL_SECONDS = 900

HELP = f"""
Runs every lesson, solved, in an environment with what Colab's TPU image holds and nothing else,
and fails if a lesson
  * has a cell that fails,
  * replaces, reinstalls or removes one of {", ".join(GUARDED)},
  * prints a Python warning that comes from a file of this project.

The environment is {VENV.name}: Python {VERSION}, the pins of constraints/{PINS.name},
{", ".join(BESIDE_PINS)} and what these need. It is rebuilt when a pin changes, or when a lesson
has changed more of it than can be undone. Each lesson starts in an empty folder with an empty
home, without mshnet; its own Setup cell installs that. git answers the repository's address
from this checkout's last commit, so the address is not contacted, and changes that are not
committed are not in the package. The lessons' text is that of the work tree.

What differs from Colab: there is no TPU and no Drive, torch may be a build with CUDA, and the
versions of {", ".join(BESIDE_PINS)} are today's.

The executed notebooks are left in {EXECUTED.relative_to(ROOT)}/.
XLA_FLAGS={QUICK_FLAG} in the environment reaches the lessons (they compile
faster); other XLA_FLAGS and variables such as PJRT_DEVICE do not.
"""


class Refused(Exception):
    """The run cannot begin: one line with the reason and the fix."""


# --- what is installed ----------------------------------------------------------------------


class Installed(NamedTuple):
    """A distribution's version, and a mark that every installation changes."""

    version: str
    mark: str


@dataclass(frozen=True)
class Change:
    """What happened to a distribution; ``None`` is a version that is not there."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.name} {self.after}"
        after = "removed" if self.after is None else self.after
        again = " (installed again)" if self.before == self.after else ""
        return f"{self.name} {self.before} → {after}{again}"


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def inventory(site: Path) -> dict[str, Installed]:
    """Return every distribution in a site-packages folder, by name."""
    found = {}
    for folder in sorted(site.glob("*.dist-info")):
        metadata = importlib.metadata.Distribution.at(folder).metadata
        if metadata is None or metadata.get("Name") is None:  # the rest of an interrupted removal
            continue
        # Installers rewrite RECORD, so its time shows that the same version was installed again.
        record = folder / "RECORD"
        mark = (
            f"{_digest(record.read_bytes())} {record.stat().st_mtime_ns}" if record.exists() else ""
        )
        found[canonical(metadata["Name"])] = Installed(metadata["Version"], mark)
    return found


def changes(before: dict[str, Installed], after: dict[str, Installed]) -> list[Change]:
    """Return the differences between two inventories, by name."""
    nothing = Installed(None, "")
    return [
        Change(name, before.get(name, nothing).version, after.get(name, nothing).version)
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def forbidden(changed: Iterable[Change]) -> list[Change]:
    """Return the changes of guarded distributions that were installed before."""
    guarded = {canonical(name) for name in GUARDED}
    return [change for change in changed if change.name in guarded and change.before is not None]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- the environment ------------------------------------------------------------------------


def find_python() -> str:
    """Return a Python of Colab's version: $PYTHON, or what tools/find_python.sh finds."""
    finder = ["sh", str(ROOT / "tools" / "find_python.sh")]
    python = os.environ.get("PYTHON") or _output(finder)
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        version = _output([python, "-c", ask]) if python else "none"
    except (OSError, subprocess.CalledProcessError):
        version = "none"
    if version != VERSION:
        raise Refused(
            f"Colab has Python {VERSION} and the one found here is {version}: "
            f"install Python {VERSION}, or give PYTHON=/path/to/python{VERSION}"
        )
    return python


def find_uv() -> str:
    """Return the path of uv: from the environment that runs this, or the machine's."""
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise Refused("uv was not found: run this through `make colab`, or pip install uv")
    return uv


class Environment:
    """A virtual environment with the packages that Colab's image is known to hold."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.baseline = folder / "colab.json"

    @property
    def site(self) -> Path:
        return next((self.folder / "lib").glob("python3.*/site-packages"))

    def prepare(self) -> None:
        """Build the environment if it is missing or was built from other pins."""
        key = self._key()
        made = self.baseline.exists() and self.python.exists()
        if not (made and json.loads(self.baseline.read_text())["key"] == key):
            self._make(key)

    def restore(self) -> None:
        """Undo what lessons did: uninstall what they added, or rebuild the environment."""
        stored = json.loads(self.baseline.read_text())
        image = {name: Installed(*values) for name, values in stored["image"].items()}
        changed = changes(image, inventory(self.site))
        if any(change.before is not None for change in changed):
            self._make(stored["key"])
        elif changed:
            names = [change.name for change in changed]
            pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *names], check=True)

    def _key(self) -> str:
        return _digest("\n".join([PINS.read_text(), VERSION, *BESIDE_PINS]).encode())

    def _make(self, key: str) -> None:
        python, uv = find_python(), find_uv()
        print(f"building {self.folder.name} (several GB the first time) …", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(self.folder)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(self.python)]
        subprocess.run([*install, "--requirement", str(PINS), *BESIDE_PINS], check=True)
        # Written last: an interrupted installation starts over.
        text = json.dumps({"key": key, "image": inventory(self.site)}, indent=1)
        self.baseline.write_text(text)


# --- the session a lesson runs in -----------------------------------------------------------


def freeze(checkout: Path, folder: Path) -> Path:
    """Return a bare copy of the checkout's HEAD, which later commits do not change."""
    copy = folder / "repository.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(checkout), str(copy)], check=True)
    # pip asks for a filtered clone; without this git refuses, and pip prints a warning.
    subprocess.run(["git", "-C", str(copy), "config", "uploadpack.allowFilter", "true"], check=True)
    return copy


def redirect(address: str, repository: Path) -> dict[str, str]:
    """Return variables that make git answer an address from a local repository."""
    # Without the suffix, which git adds itself, so both forms of the address match.
    return {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository.with_suffix('').as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": address,
        "GIT_TERMINAL_PROMPT": "0",
    }


def session_variables(venv: Path, home: Path, git: dict[str, str]) -> dict[str, str]:
    """Return a session's variables: the machine's without a developer's, and an empty home."""
    kept = {name: value for name, value in os.environ.items() if not NOT_ON_COLAB.match(name)}
    if QUICK_FLAG in os.environ.get("XLA_FLAGS", "").split():
        kept["XLA_FLAGS"] = QUICK_FLAG
    path = os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", os.defpath)])
    return {**kept, **git, "PATH": path, "HOME": str(home), "TMPDIR": str(home.parent / "tmp")}


def make_home(home: Path) -> None:
    """Make a home with nothing but pip's settings, which name the machine's package index."""
    home.mkdir()
    settings = (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pip" / "pip.conf"
    )
    old_settings = Path.home() / ".pip" / "pip.conf"
    for source, place in ((settings, ".config/pip/pip.conf"), (old_settings, ".pip/pip.conf")):
        if source.is_file():
            (home / place).parent.mkdir(parents=True)
            (home / place).symlink_to(source)


def kernel_manager(python: Path, folder: Path) -> AsyncKernelManager:
    """Return a manager that starts kernels with the given Python only."""
    spec = folder / "kernels" / "colab" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Colab", "language": "python"}))
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
    return AsyncKernelManager(kernel_name="colab", kernel_spec_manager=specs)


def execute(notebook: nbformat.NotebookNode, python: Path, folder: Path, git: dict) -> str | None:
    """Run a notebook's cells in a new session under `folder`; return the fault, or None."""
    for part in ("content", "tmp"):
        (folder / part).mkdir()
    make_home(folder / "home")
    interrupt = Interrupt()
    begun = []  # kept here because a kernel that dies at once reports nothing
    client = NotebookClient(
        notebook,
        km=kernel_manager(python, folder),
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(folder / "content")}},
        on_notebook_start=interrupt.listen,
        on_cell_execute=lambda cell, cell_index: begun.append(cell_index),
    )
    variables = session_variables(python.parent.parent, folder / "home", git)
    with (folder / "kernel.log").open("w") as log:  # output of the kernel itself, not of its cells
        try:
            # By default a manager that is passed in stays alive, and its kernel with it.
            client.execute(env=variables, stdout=log, stderr=log, cleanup_kc=True)
        except CellExecutionError:
            return failing_cell(notebook, begun)
        except CellTimeoutError:
            return f"a cell ran for more than {CELL_SECONDS} s\n{failing_cell(notebook, begun)}"
        except (DeadKernelError, asyncio.CancelledError):
            if interrupt.came:
                raise KeyboardInterrupt from None
            last = _tail((folder / "kernel.log").read_text(), 10)
            return f"the kernel died\n{failing_cell(notebook, begun)}\n{last}"
    return None


class Interrupt:
    """Ctrl-C ends the run. With nbclient's own handlers the next lesson starts."""

    def __init__(self):
        self.came = False

    def listen(self, **_) -> None:
        """Replace the client's handlers; called when the notebook starts."""
        task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, task)

    def _stop(self, task: asyncio.Task) -> None:
        self.came = True
        task.cancel()  # the client then shuts the kernel down


# --- reading an executed notebook -----------------------------------------------------------


def failing_cell(notebook: nbformat.NotebookNode, begun: list[int]) -> str:
    """Return the last cell that started: its source, and the end of its output."""
    if not begun:
        return "no cell started"
    cell = notebook.cells[begun[-1]]
    number = f"{begun[-1] + 1} of {len(notebook.cells)}"
    printed = _tail(streams([cell]), 8)
    errors = [output for output in cell.get("outputs", ()) if output.output_type == "error"]
    trace = _tail("\n".join("\n".join(error.traceback) for error in errors), 14)
    parts = [f"cell {number}:", textwrap.indent(cell.source, "    "), printed, trace]
    return "\n".join(part for part in parts if part)


def _times(cell: nbformat.NotebookNode) -> dict:
    return cell.metadata.get("execution", {})


def _tail(text: str, lines: int) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()
    last = [line.rstrip("\r").split("\r")[-1] for line in plain.split("\n")]  # of a bar, its end
    return "\n".join(last[-lines:])


# --- the run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one lesson."""

    name: str
    seconds: float
    installed: list[Change]
    problems: list[str]

    def row(self) -> str:
        verdict = "failed" if self.problems else "ok"
        what = ", ".join(map(str, self.installed)) or "nothing"
        return f"{self.name:<44} {self.seconds:5.0f} s  {verdict:<6}  installed {what}"


def run_lesson(
    name: str, notebook: nbformat.NotebookNode, environment: Environment, folder: Path, git: dict
) -> Outcome:
    """Run one lesson in the environment as it is, and collect its faults."""
    before, start = inventory(environment.site), time.monotonic()
    error = execute(notebook, environment.python, folder, git)
    seconds = time.monotonic() - start
    changed = changes(before, inventory(environment.site))
    problems = [error] if error else []
    problems += [f"{name} replaces {change}" for change in forbidden(changed)]
    problems += [f"{name} warns: {line}" for line in own_warnings(notebook)]
    return Outcome(name, seconds, changed, problems)


def solved_lessons(only: list[str]) -> dict[str, nbformat.NotebookNode]:
    """Return the notebooks to run, by name, with their exercises solved."""
    sources = notebooks.sources()
    unknown = [number for number in only if not any(s.stem.startswith(number) for s in sources)]
    if unknown:
        known = " ".join(source.stem[:2] for source in sources)
        raise Refused(f"there is no lesson {', '.join(unknown)}: --only takes numbers of {known}")
    chosen = [s for s in sources if not only or s.stem.startswith(tuple(only))]
    return {source.stem: notebooks.build(source, solved=True) for source in chosen}


def _output(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _introduce(environment: Environment, repository: Path) -> None:
    commit = _output(["git", "-C", str(repository), "rev-parse", "--short", "HEAD"])
    python = _output(
        [str(environment.python), "-c", "import platform as p; print(p.python_version())"]
    )
    print(f"environment: Python {python} and constraints/{PINS.name}, in {environment.folder.name}")
    print(f"mshnet: the lessons install commit {commit}, this checkout's HEAD")
    installed = ("mshnet", "tpuscope", "course", "benchmarks", "labs")
    if _output(["git", "-C", str(ROOT), "status", "--porcelain", "--", *installed]):
        print("  the work tree has changes that are not committed: the lessons do not install them")
    if QUICK_FLAG in os.environ.get("XLA_FLAGS", "").split():
        print(f"XLA_FLAGS={QUICK_FLAG}: compiles faster; Colab does not set it")


def run_lessons(lessons: dict[str, nbformat.NotebookNode], keep: bool) -> list[Outcome]:
    """Run the lessons one after another, and print the result of each."""
    environment, outcomes = Environment(VENV), []
    EXECUTED.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleaning:
        _lock(cleaning.enter_context((EXECUTED / ".lock").open("w")))
        environment.prepare()
        # Outside the repository: no relative path leads back into it. Short: sockets lie in it.
        folder = Path(tempfile.mkdtemp(prefix="colab-"))
        if not keep:
            cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        repository = freeze(ROOT, folder)
        git = redirect(notebooks.repository(), repository)
        _introduce(environment, repository)
        for number, (name, notebook) in enumerate(lessons.items(), start=1):
            print(f"lesson {number} of {len(lessons)}  {name} …", flush=True)
            environment.restore()
            session = folder / name[:2]
            session.mkdir()
            outcome = run_lesson(name, notebook, environment, session, git)
            nbformat.write(notebook, EXECUTED / f"{name}.ipynb")
            if not keep:
                shutil.rmtree(session, ignore_errors=True)
            _print(outcome)
            outcomes.append(outcome)
        environment.restore()
        if keep:
            print(f"the lessons' folders are kept in {folder}")
    return outcomes


def _lock(file: IO) -> None:
    """Lock the environment until the file is closed: two runs would undo each other's changes."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"another run is using {VENV.name}: wait until it has ended") from None


def _print(outcome: Outcome) -> None:
    print(outcome.row())
    for problem in outcome.problems:
        print(textwrap.indent(problem, "  | "))
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split(":")[0] + ".",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NN", help="lessons, such as 01 03"
    )
    parser.add_argument("--keep", action="store_true", help="leave the lessons' working folders")
    arguments = parser.parse_args()
    try:
        outcomes = run_lessons(solved_lessons(arguments.only), arguments.keep)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:  # uv, pip or git, which has printed the reason
        print(f"the run stopped: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    failed = [outcome for outcome in outcomes if outcome.problems]
    print("", *(outcome.row() for outcome in outcomes), sep="\n")
    total = sum(outcome.seconds for outcome in outcomes)
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} lessons ok, {total:.0f} s")
    print(f"executed notebooks: {EXECUTED.relative_to(ROOT)}/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
