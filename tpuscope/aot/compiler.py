"""The TPU's compiler, in a process of its own; its answers are kept in a cache folder."""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from ..engine import tpu_specs
from ..engine.lazy_graph import Program
from ..engine.tpu_specs import Topology
from ..errors import Failed, RequestError
from ..files import write_atomic
from ..monitor import layers
from ..progress import someone_watches
from . import EFFORTS, answer, cache_folder, hlo, report, toolchain
from .report import Report
from .toolchain import Toolchain

_WORKER = Path(__file__).with_name("worker.py")


class CompilerFailed(Failed):
    """The compiler gave no answer: it was killed, or it cannot compile the program."""

    def __init__(self, message: str, code: str = "compiler"):
        super().__init__(message, code)


class WrongProgram(RequestError):
    """The program cannot be read, or is for more cores than the slice has."""

    def __init__(self, message: str, code: str = "wrong-program"):
        super().__init__(message, code)


class CompilerTooOld(RequestError):
    """The chosen compiler does not know the slice; the message names one that does."""

    def __init__(self, message: str, code: str = "compiler-too-old"):
        super().__init__(message, code)


def compile_program(
    program: Program | bytes,
    topology: str = "v5e:1x1",
    cores: int | None = None,
    effort: str = "fast",
    use_cache: bool = True,
    progress: bool | None = None,
    flags: dict[str, str] | None = None,
    compiler: str | None = None,
) -> Report:
    """Compile a program for a TPU, in another process.

    Args:
        program: from :func:`~tpuscope.aot.trace` or :func:`~tpuscope.aot.read_program`, or
            StableHLO: a portable artifact, MLIR bytecode or MLIR text.
        topology: see :func:`tpuscope.engine.tpu_specs.names`.
        cores: that the program is for, at most those of the slice; None: the program's own.
        effort: ``"fast"`` asks for the compiler's least effort, which takes a fraction of the time
            and may move more bytes or reject more; ``"full"`` is what a TPU's user gets.
        use_cache: take an earlier answer about the same program, if there is one.
        progress: show that the compiler is at work; None: to a terminal or a notebook only.
        flags: what ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` will be on the TPU, by name. This
            process's ``XLA_FLAGS`` are the CPU's, and left out.
        compiler: a Python that has jax and libtpu; None: see :meth:`Toolchain.find`.

    Raises:
        UnknownTopology: no such slice, or it has fewer cores.
        CompilerUnavailable: jax or libtpu is missing.
        CompilerTooOld: it does not know the slice.
        WrongProgram: it cannot read the program.
        CompilerFailed: no answer.
    """
    if effort not in EFFORTS:
        raise RequestError(f"effort {effort!r}: must be one of {', '.join(EFFORTS)}", "range")
    if isinstance(program, bytes):
        program = Program(program, cores=None)
    slice_ = Topology.parse(topology)
    cores = cores or program.cores
    if cores is not None and cores > slice_.cores:
        raise tpu_specs.UnknownTopology(
            f"{topology} has {slice_.cores} cores, and the program is for {cores}"
        )
    chosen = Toolchain.find(compiler)
    request = _slice_request(slice_) | {
        "cores": cores,
        "effort": effort,
        "aliases": program.aliases,
        "flags": {"LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""), **(flags or {})},
    }
    kept = cache_folder() / f"{_digest(program, request, chosen)}.json"
    if use_cache and (report := _kept(kept)):
        return report
    report = _ask(program, request, slice_, chosen, progress)
    if use_cache:
        _keep(report, kept)
    return report


def require_compiler(python: str | None = None, slice_: Topology | None = None) -> Toolchain:
    """Return the chosen compiler, checked before a step is traced.

    Args:
        python: see :meth:`Toolchain.find`.
        slice_: that it must know. Only what the project's own libtpu does not know is asked for,
            which takes seconds.

    Raises:
        CompilerUnavailable: with what to install.
        CompilerTooOld: it does not know the slice.
    """
    chosen = Toolchain.find(python)
    if slice_ is not None and slice_.chip.libtpu:
        _require_slice(chosen, slice_)
    return chosen


@functools.cache
def _require_slice(chosen: Toolchain, slice_: Topology) -> None:
    request = _slice_request(slice_) | {"flags": {}}
    with tempfile.TemporaryDirectory(prefix="aot-") as name:
        _answer(Path(name), request, slice_, chosen, progress=False)


def _slice_request(slice_: Topology) -> dict:
    # One chip is less than the board that the compiler takes for granted.
    options = {"chips_per_host_bounds": [1, 1, 1]} if set(slice_.sides) == {1} else {}
    return {"topology": str(slice_), "options": options}


def _digest(program: Program, request: dict, chosen: Toolchain) -> str:
    """Return a digest of everything that an answer depends on."""
    parts = [program.digest, request, _code(), chosen.versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Return a digest of the code that makes answers."""
    modules = (answer, report, hlo, layers, tpu_specs, toolchain)
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


def _ask(
    program: Program,
    request: dict,
    slice_: Topology,
    chosen: Toolchain,
    progress: bool | None,
) -> Report:
    with tempfile.TemporaryDirectory(prefix="aot-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(program.stablehlo)
        left = _answer(folder, request, slice_, chosen, progress)
        about = {
            "topology": str(slice_),
            "cores": left["cores"],
            "effort": request["effort"],
            "program": program.digest,
            "libtpu": left["libtpu"],
        }
        if "error" not in left:
            return answer.accepted(left, _dumped(folder, "after_codegen"), about, slice_)
        if found := hlo.refusal(left["error"]):
            return answer.refused(found, about, _dumped(folder, "oom_intermediate_module"))
        message = " ".join(left["error"].split())[:500]
        raise CompilerFailed(f"the compiler rejects the program: {message}", "rejected")


def _answer(
    folder: Path, request: dict, slice_: Topology, chosen: Toolchain, progress: bool | None
) -> dict:
    """Return what the worker answers about the program in the folder, if there is one.

    Raises:
        CompilerTooOld: it does not know the slice.
        WrongProgram: it cannot read the program.
        CompilerFailed: it left no answer.
    """
    (folder / "request.json").write_text(json.dumps(request))
    _run_worker(folder, f"compiling for {slice_}", progress, request["flags"], chosen.python)
    left = json.loads((folder / "answer.json").read_text())
    if "slice_refused" in left:
        words = " ".join(left["slice_refused"].split())[:200]
        known = slice_.chip.libtpu
        needs = f"libtpu {known} knows it: {toolchain.newest()}" if known else ""
        raise CompilerTooOld(
            f"{slice_}: libtpu {left['libtpu']} refuses it ({words}); {needs}".rstrip("; ")
        )
    if "wrong" in left:
        raise WrongProgram(left["wrong"])
    return left


def _dumped(folder: Path, stage: str) -> str:
    """Return the program as text after a stage of compiling; "" if there is none."""
    return "".join(path.read_text() for path in (folder / "dump").glob(f"*.{stage}.txt"))


def _run_worker(folder: Path, what: str, progress: bool | None, flags: dict, python: str) -> None:
    """Run the compiler's process to its end.

    Raises:
        CompilerFailed: it left no answer.
    """
    if progress is None:
        progress = someone_watches()
    # Flags for the CPU's XLA and settings of a real TPU would change what is compiled.
    inherited = os.environ if python == sys.executable else toolchain.environment()
    environment = {
        name: value
        for name, value in inherited.items()
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
            [python, "-P", str(_WORKER), str(folder)],
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
