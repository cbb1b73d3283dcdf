"""The TPU's compiler, in a process of its own; its answers are kept in a cache folder."""

import functools
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from .. import versions
from ..engine import tpu_specs
from ..engine.lazy_graph import Program
from ..engine.tpu_specs import Topology
from ..errors import Failed, RequestError
from ..files import write_atomic
from ..monitor import layers
from ..progress import someone_watches
from . import EFFORTS, answer, cache_folder, hlo, report
from .report import Report

_NEEDED = ("jax", "jaxlib", "libtpu")
_WORKER = Path(__file__).with_name("worker.py")


class CompilerUnavailable(RequestError):
    """jax, jaxlib or libtpu is not installed; the message says how to install them."""

    def __init__(self, message: str, code: str = "not-installed"):
        super().__init__(message, code)


class CompilerFailed(Failed):
    """The compiler gave no answer: it was killed, or it cannot compile the program."""

    def __init__(self, message: str, code: str = "compiler"):
        super().__init__(message, code)


def compile_program(
    program: Program | bytes,
    topology: str = "v5e:1x1",
    cores: int | None = None,
    effort: str = "fast",
    use_cache: bool = True,
    progress: bool | None = None,
    flags: dict[str, str] | None = None,
) -> Report:
    """Compile a program for a TPU, in another process.

    Args:
        program: from :func:`~tpuscope.aot.trace`, or StableHLO bytecode as torch_xla exports it.
        topology: see :func:`tpuscope.engine.tpu_specs.names`.
        cores: that the program is for, at most those of the slice; None: the program's own.
        effort: ``"fast"`` asks for the compiler's least effort, which takes a fraction of the time
            and may move more bytes or reject more; ``"full"`` is what a TPU's user gets.
        use_cache: take an earlier answer about the same program, if there is one.
        progress: show that the compiler is at work; None: to a terminal or a notebook only.
        flags: what ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` will be on the TPU, by name. This
            process's ``XLA_FLAGS`` are the CPU's, and left out.

    Raises:
        UnknownTopology: no such slice, or it has fewer cores.
        CompilerUnavailable: jax or libtpu is missing.
        CompilerFailed: no answer.
    """
    if effort not in EFFORTS:
        raise RequestError(f"effort {effort!r}: must be one of {', '.join(EFFORTS)}", "range")
    if isinstance(program, bytes):
        program = Program(program)
    slice_ = Topology.parse(topology)
    cores = cores or program.cores
    if cores > slice_.cores:
        raise tpu_specs.UnknownTopology(
            f"{topology} has {slice_.cores} cores, and the program is for {cores}"
        )
    require_compiler()
    request = {
        "topology": str(slice_),
        # One chip is less than the board that the compiler takes for granted.
        "options": {"chips_per_host_bounds": [1, 1, 1]} if set(slice_.sides) == {1} else {},
        "cores": cores,
        "effort": effort,
        "aliases": program.aliases,
        "flags": {"LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""), **(flags or {})},
    }
    kept = cache_folder() / f"{_digest(program, request)}.json"
    if use_cache and (report := _kept(kept)):
        return report
    report = _ask(program, request, slice_, progress)
    if use_cache:
        _keep(report, kept)
    return report


def require_compiler() -> None:
    """Check that the TPU's compiler is installed.

    Raises:
        CompilerUnavailable: with what to install.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CompilerUnavailable(
            f"the TPU's compiler needs {' and '.join(missing)}, not installed here; on Linux: "
            f"{versions.install_compiler()}"
        )


def _digest(program: Program, request: dict) -> str:
    """Return a digest of everything that an answer depends on."""
    parts = [program.digest, request, _code()]
    parts += [metadata.version(name) for name in _NEEDED]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return a digest of the code that makes answers."""
    modules = (answer, report, hlo, layers, tpu_specs)
    files = (__file__, _WORKER, *(module.__file__ for module in modules))
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files if file)).hexdigest()


def _kept(path: Path) -> Report | None:
    try:
        return replace(Report(**json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError):  # none, or one that was cut off
        return None


def _keep(report: Report, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(report)))
    except OSError as error:
        print(f"the answer is not kept: {error}", file=sys.stderr)


def _ask(program: Program, request: dict, slice_: Topology, progress: bool | None) -> Report:
    """Run the compiler, and return what it reports."""
    with tempfile.TemporaryDirectory(prefix="aot-") as name:
        folder = Path(name)
        (folder / "program.bc").write_bytes(program.stablehlo)
        (folder / "request.json").write_text(json.dumps(request))
        _run_worker(folder, f"compiling for {slice_}", progress, request["flags"])
        left = json.loads((folder / "answer.json").read_text())
        about = {
            "topology": str(slice_),
            "cores": request["cores"],
            "effort": request["effort"],
            "program": program.digest,
            "libtpu": left["libtpu"],
        }
        if "error" not in left:
            return answer.accepted(left, _compiled(folder), about, slice_)
        if found := hlo.refusal(left["error"]):
            return answer.refused(found, about)
        message = " ".join(left["error"].split())[:500]
        raise CompilerFailed(f"the compiler rejects the program: {message}", "rejected")


def _compiled(folder: Path) -> str:
    """Return the compiled program as text."""
    [path] = (folder / "dump").glob("*.after_codegen.txt")
    return path.read_text()


def _run_worker(folder: Path, what: str, progress: bool | None, flags: dict) -> None:
    """Run the compiler's process to its end.

    Raises:
        CompilerFailed: it left no answer.
    """
    if progress is None:
        progress = someone_watches()
    # Flags for the CPU's XLA and settings of a real TPU would change what is compiled.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.startswith(("TPU_", "PJRT_", "JAX_"))
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # do not look for a TPU VM's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling opens no TPU
    }
    environment |= flags
    dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    environment["XLA_FLAGS"] = f"{flags.get('XLA_FLAGS', '')} {dump}"
    with (folder / "log").open("w+b") as log:
        # -P: without the modules beside the worker.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            with tqdm(
                desc=what,
                bar_format="{desc}: {elapsed}",
                disable=not progress,
                leave=False,
                mininterval=0.5,
            ) as bar:
                while process.poll() is None:
                    time.sleep(0.1)
                    bar.update()
        finally:
            process.kill()  # Ctrl-C, or a notebook's stop button
            process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    if not (folder / "answer.json").exists():
        raise CompilerFailed(_why(process.returncode, output))


def _why(code: int, output: str) -> str:
    """Return one line about a compiler's process that left no answer."""
    if code == -signal.SIGKILL:
        return (
            "the compiler was killed, as happens when a machine runs out of memory: use a smaller "
            "batch, smaller images, or a machine with more memory"
        )
    lines = [line for line in output.splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the compiler ended with {how}: {lines[-1] if lines else 'no output'}"
