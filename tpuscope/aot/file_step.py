"""A step from a user's file, traced in a process that has opened no device yet."""

import contextlib
import gc
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..engine import torch_xla as runtime
from ..engine.lazy_graph import Program
from ..engine.spmd import DataMesh
from ..errors import RequestError
from .tracing import trace


def trace_file(path: str, function: str, arguments: dict, cores: int) -> Program:
    """Return the program of the step that a function in a file returns.

    Args:
        path: a Python file.
        function: its name there; returns ``(step, inputs)``.
        arguments: by name.
        cores: virtual ones; more than one form an SPMD mesh.

    Raises:
        RequestError: the file or its function fails, or returns something else.
        StepIsCut: the step is not one program.
    """
    runtime.select_platform("CPU", cores)
    mesh = DataMesh() if cores > 1 else None
    runtime.device()  # before any backward pass in the file
    name = f"{path}:{function}"
    # Standard output belongs to the report.
    with contextlib.redirect_stdout(sys.stderr), _faults_of(path, name):
        build = _load(Path(path), function)
        returned = build(**arguments)
        if not (
            isinstance(returned, Sequence)
            and len(returned) == 2
            and callable(returned[0])
            and isinstance(returned[1], list | tuple)
        ):
            kind = type(returned).__name__
            raise RequestError(f"{name} must return (step, inputs), not {kind}", "step-return")
        step, inputs = returned
        if mesh:
            inputs = _spread(mesh, inputs)
        return trace(step, inputs)


def _load(path: Path, function: str) -> Callable:
    """Import the file as a module, and return a function of it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RequestError(f"{path}: not a Python file (.py)", "no-such-file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours, as for a script
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise RequestError(f"{path} has no function {function}", "no-such-function")
    return found


def _spread(mesh: DataMesh, inputs: Sequence) -> list:
    """Replicate what is on the device, and return the inputs split over the cores."""
    import torch_xla.core.xla_model as xm

    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
    mesh.replicate([t for t in things if type(t) in kinds and t.device.type == "xla"])

    def split(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] % mesh.cores:
            shape = tuple(tensor.shape)
            raise RequestError(
                f"--num-cores {mesh.cores}: an input has shape {shape}, and its first axis must be "
                "a multiple of the cores",
                "batch-size",
            )
        spec = mesh.split(tensor.dim())
        sent: Any = xm.send_cpu_data_to_device([tensor.cpu()], runtime.device(), spec)
        return sent[0]

    return tree_map_only(Tensor, split, list(inputs))


@contextlib.contextmanager
def _faults_of(path: str, name: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line that names its place in the file."""
    try:
        yield
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if Path(f.filename).resolve() == Path(path).resolve()]
        line = own[-1] if own else getattr(error, "lineno", None)  # a SyntaxError has its own
        where = f", line {line}" if line else ""
        raise RequestError(
            f"{name} raised {type(error).__name__}{where}: {error}", "step-raised"
        ) from None
