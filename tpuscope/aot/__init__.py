"""Compile a step for a TPU that is not there: ``aot.compile(step, inputs, topology="v5e:1x1")``.

libtpu holds the whole TPU compiler, and compiling takes no TPU. So a step is traced as always, its
program is compiled for the slice that one thinks of, and the compiled program says what it needs:
memory, bytes moved, operations, what the cores exchange. It does not say how long a step takes;
:func:`Chip.roofline <tpuscope.engine.tpu_specs.Chip.roofline>` says how long it takes at least.

The compiler runs in a process of its own, and its answers are kept (:func:`cache_folder`).
"""

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
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from ..engine import lazy_graph, tpu_specs
from ..engine.lazy_graph import Program
from ..engine.tpu_specs import Topology
from ..errors import Failed
from ..monitor import layers
from . import hlo
from . import report as reports
from .report import Report

EFFORTS = ("fast", "full")
_NEEDED = ("jax", "jaxlib", "libtpu")
_LARGEST = 10  # buffers that are named
_WORKER = Path(__file__).with_name("worker.py")


class CompilerUnavailable(RuntimeError):
    """jax, jaxlib or libtpu is not installed; the message says how to get them."""


class StepIsCut(RuntimeError):
    """A step is not one program: it reads a value, ends itself, or leaves nothing to compute."""


class CompilerFailed(Failed):
    """The compiler gave no answer: it was killed, or it cannot compile the program."""


def compile(
    step: Callable,
    inputs: tuple | list = (),
    topology: str = "v5e:1x1",
    effort: str = "fast",
    use_cache: bool = True,
    progress: bool | None = None,
    flags: dict[str, str] | None = None,
) -> Report:
    """Trace one step, and compile it for a TPU.

    The step is traced on this process's XLA device, and not computed: like a real one it changes
    the parameters in place, but nothing runs before the next ``torch_xla.sync()``. What is
    compiled is what that would compute and keep, so the step must not call it, nor read a value.

    State that the first step creates (an optimizer's momentum) is no argument of that step. To see
    the steps that come after it, take one real step before.

    Args:
        step: called with the inputs; forward, loss, backward, update. Its model is on the XLA
            device.
        inputs: its arguments; tensors in them, at any depth, are moved to the device.
        topology: see :func:`tpuscope.engine.tpu_specs.names`. The program is one core's, or if
        this process
            has an SPMD mesh, that of as many cores.
        effort: see :func:`compile_program`.
        use_cache: see :func:`compile_program`.
        progress: see :func:`compile_program`.
        flags: see :func:`compile_program`.

    Raises:
        StepIsCut: the step is more or less than one program.
        UnknownTopology: no such slice, or it has fewer cores.
        CompilerUnavailable: jax or libtpu is missing.
        CompilerFailed: no answer.
    """
    require_compiler()
    slice_ = Topology.parse(topology)
    program = trace(step, inputs)
    return compile_program(program, str(slice_), None, effort, use_cache, progress, flags)


def trace(step: Callable, inputs: tuple | list = ()) -> Program:
    """The program of one step, its operations labelled with their layers; see :func:`compile`.

    Raises:
        StepIsCut: the step is more or less than one program.
    """
    from ..engine import torch_xla as runtime

    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(runtime.device()), list(inputs))
    before = lazy_graph.marks(lazy_graph.pending())
    runtime.wait()  # what runs still would be counted as a part of the step
    executed = _executions()
    with _OneProgram():
        result = step(*inputs)
        # Whoever keeps a result keeps what autograd saved for it, too; the values alone do not.
        result = tree_map_only(Tensor, Tensor.detach, result)
    runtime.wait()  # a program is counted when it has run
    if _executions() > executed:
        raise StepIsCut(
            "the step ran a part of itself: it calls torch_xla.sync(), prints a tensor, or has an "
            "operation without lowering, which runs on the host (tpuscope.track names it)"
        )
    outputs = lazy_graph.pending(before)
    if not outputs:
        raise StepIsCut(
            "the step left nothing to compute: its model and inputs must be on the XLA device "
            "(tpuscope.engine.torch_xla.device())"
        )
    program = lazy_graph.lower(outputs)
    del result
    return program


class _OneProgram(layers.LayerLabels):
    """Labels operations, and stops a step before it reads a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if _reads(function, args, kwargs or {}):
            raise StepIsCut(
                f"{self.current()} reads a value ({function}), which cuts the step in two: leave "
                "out item(), cpu() and decisions by values"
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


def _reads(function: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether an operation fetches from the XLA device."""
    if function is torch.ops.aten._local_scalar_dense.default:
        return args[0].device.type == "xla"
    if function is torch.ops.aten._to_copy.default:
        target = kwargs.get("device")
        return args[0].device.type == "xla" and target is not None and target.type != "xla"
    if function is torch.ops.aten.copy_.default:
        return args[1].device.type == "xla" and args[0].device.type != "xla"
    return False


def _executions() -> int:
    """Programs that have run on this process's XLA device."""
    import torch_xla.debug.metrics as met

    names = [name for name in met.counter_names() if name.startswith("Execute")]
    return sum(met.counter_value(name) for name in names)


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
        program: from :func:`trace`, or StableHLO bytecode as torch_xla exports it.
        topology: see :func:`tpuscope.engine.tpu_specs.names`.
        cores: that the program is for, at most those of the slice; default: the program's own.
        effort: ``"fast"`` asks for the compiler's least effort, which takes a fraction of the time
            and may move more bytes or refuse more; ``"full"`` is what a TPU's user gets.
        use_cache: take an earlier answer about the same program, if there is one.
        progress: show that the compiler is at work; default: where somebody watches.
        flags: what ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS`` will be on the TPU, by name. This
            process's ``XLA_FLAGS`` are the CPU's, and left out.

    Raises:
        UnknownTopology: no such slice, or it has fewer cores.
        CompilerUnavailable: jax or libtpu is missing.
        CompilerFailed: no answer.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort {effort!r}: must be one of {', '.join(EFFORTS)}")
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


def cache_folder() -> Path:
    """Where answers are kept: ``~/.cache/torch_xla_aot``, or below ``XDG_CACHE_HOME``."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "torch_xla_aot"


def require_compiler() -> None:
    """Check that the TPU's compiler is installed.

    Raises:
        CompilerUnavailable: with what to install.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        libtpu = "0.0.21.1" if sys.version_info >= (3, 13) else "0.0.21"
        raise CompilerUnavailable(
            f"the TPU's compiler needs {' and '.join(missing)}, not installed here; on Linux: "
            f"pip install jax==0.7.2 jaxlib==0.7.2 libtpu=={libtpu}"
        )


def _digest(program: Program, request: dict) -> str:
    """Of everything that an answer depends on."""
    parts = [program.digest, request, _code()]
    parts += [metadata.version(name) for name in _NEEDED]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """Of the code that makes answers."""
    files = (__file__, reports.__file__, hlo.__file__, layers.__file__, tpu_specs.__file__, _WORKER)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


def _kept(path: Path) -> Report | None:
    try:
        return replace(Report(**json.loads(path.read_text())), cached=True)
    except (OSError, ValueError, TypeError):  # none, or one that was cut off
        return None


def _keep(report: Report, path: Path) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(report)))
        part.replace(path)
    except OSError as error:
        print(f"the answer is not kept: {error}", file=sys.stderr)


def _ask(program: Program, request: dict, slice_: Topology, progress: bool | None) -> Report:
    """Let the compiler work, and read what it leaves."""
    with tempfile.TemporaryDirectory(prefix="aot-") as name:
        folder = Path(name)
        (folder / "program.bc").write_bytes(program.stablehlo)
        (folder / "request.json").write_text(json.dumps(request))
        _run_worker(folder, f"compiling for {slice_}", progress, request["flags"])
        answer = json.loads((folder / "answer.json").read_text())
        about = {
            "topology": str(slice_),
            "cores": request["cores"],
            "effort": request["effort"],
            "program": program.digest,
            "libtpu": answer["libtpu"],
        }
        if "error" in answer:
            return _refused(answer["error"], about)
        return _accepted(answer, _compiled(folder), about, slice_)


def _compiled(folder: Path) -> str:
    """The compiled program, as the compiler writes it."""
    [path] = (folder / "dump").glob("*.after_codegen.txt")
    return path.read_text()


def _run_worker(folder: Path, what: str, progress: bool | None, flags: dict) -> None:
    """Run the compiler's process to its end.

    Raises:
        CompilerFailed: it left no answer.
    """
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    # Flags for the CPU's XLA, and a real TPU's settings, would change what is compiled.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.startswith(("TPU_", "PJRT_", "JAX_"))
    }
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # do not look for a TPU VM's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nobody's TPU is taken by compiling
    }
    environment |= flags
    dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    environment["XLA_FLAGS"] = f"{flags.get('XLA_FLAGS', '')} {dump}"
    with (folder / "log").open("w+b") as log:
        # -P: this folder's modules are not for import as `runtime` and `launch`.
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
        said = log.read().decode(errors="replace")
    if not (folder / "answer.json").exists():
        raise CompilerFailed(_why(process.returncode, said))


def _why(code: int, said: str) -> str:
    """One line for people about a compiler's process that left no answer."""
    if code == -signal.SIGKILL:
        return (
            "the compiler was killed, as a machine does that runs out of memory: try a smaller "
            "batch, smaller images, or a machine with more memory"
        )
    lines = [line for line in said.splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the compiler ended with {how}: {lines[-1] if lines else 'it said nothing'}"


def _refused(message: str, about: dict) -> Report:
    """
    Raises:
        CompilerFailed: for another reason than memory.
    """
    refusal = hlo.refusal(message)
    if refusal is None:
        raise CompilerFailed(f"the compiler refuses the program: {' '.join(message.split())[:500]}")
    return Report(
        **about,
        compiles=False,
        fits=False,
        hbm_bytes=refusal.used,
        hbm_limit_bytes=refusal.limit,
        buffers=refusal.buffers[:_LARGEST],
    )


def _accepted(answer: dict, text: str, about: dict, slice_: Topology) -> Report:
    steps = hlo.instructions(text)
    moved = sum(step.moved for step in steps)
    unpadded = sum(step.moved_unpadded for step in steps)
    seconds, bound = slice_.chip.roofline(answer["flops"], answer["accessed"])
    taken = ("arguments", "outputs", "temporaries", "code")
    sizes = {f"{name}_bytes": answer[name] for name in (*taken, "aliased", "peak")}
    needed = sum(answer[name] for name in taken) - answer["aliased"]
    return Report(
        **about,
        **sizes,
        compiles=True,
        fits=needed <= slice_.chip.usable,
        hbm_bytes=needed,
        hbm_limit_bytes=slice_.chip.usable,
        bytes_accessed=answer["accessed"],
        padding=moved / unpadded if unpadded else 1.0,
        flops=answer["flops"],
        cycles=sum(step.cycles for step in steps),
        roofline_seconds=seconds,
        bound=bound,
        layers=_by_layer(steps),
        buffers=_largest(steps),
        collectives=hlo.collectives(text),
        compile_seconds=answer["compile_seconds"],
    )


def _by_layer(steps: list[hlo.Instruction]) -> list[dict]:
    found: dict[str, dict] = {}
    for step in steps:
        name = layers.layer_of(step.operation).removesuffix(layers.GRADIENT)
        layer = found.setdefault(name, {"layer": name, "bytes": 0, "cycles": 0, "largest_bytes": 0})
        layer["bytes"] += step.moved
        layer["cycles"] += step.cycles
        largest = max((array.size for array in step.results), default=0)
        layer["largest_bytes"] = max(layer["largest_bytes"], largest)
    return sorted(found.values(), key=lambda layer: -layer["bytes"])


def _largest(steps: list[hlo.Instruction]) -> list[dict]:
    found = [(array, step) for step in steps for array in step.results]
    found.sort(key=lambda pair: -pair[0].size)
    return [
        {
            "operation": step.operation or step.kind,
            "shape": array.shape,
            "bytes": array.size,
            "unpadded_bytes": array.unpadded,
        }
        for array, step in found[:_LARGEST]
    ]
