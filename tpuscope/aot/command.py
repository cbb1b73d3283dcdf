"""``tpuscope aot`` on the command line."""

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.tpu_specs import Topology
from ..errors import RequestError
from . import EFFORTS, cache_folder

if TYPE_CHECKING:
    from .report import Report

EPILOG = """\
libtpu holds the whole TPU compiler, and compiling takes no TPU. FUNCTION is called in a new process
that has virtual XLA cores on the CPU. It returns (step, inputs): a function that does one step, and
the list of its arguments. The model must be on torch_xla.device(). With --num-cores above 1 the
inputs' first axis is split over the cores and everything else is replicated (SPMD).

FILE is a program that was saved as StableHLO: a portable artifact, MLIR bytecode or MLIR text, from
TorchTPU, jax.export (mlir_module_serialized) or torch_xla. It says itself for how many cores it is.

example, net.py:

    import torch, torch_xla
    from torch import nn

    def training(batch_size=32):
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 1, 3)).to(torch_xla.device())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(images):
            optimizer.zero_grad()
            loss = net(images).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step, [torch.zeros(batch_size, 3, 64, 64)]

  on one core, as in Colab:
      tpuscope aot net.py:training
  on Kaggle's eight, with a larger batch:
      tpuscope aot net.py:training --topology v5e:2x4 --arg batch_size=256
  a saved program, by the newest compiler in an environment of its own:
      tpuscope aot step.mlir --topology tpu7x:2x2x1 --compiler newest/bin/python

The answer is an estimate by the compiler, not a run: no step is faster than "at least", and many
are slower. State that the first step creates (momentum) is in the program of later steps only: call
step(*inputs) and torch_xla.sync() once before you return it.

exit codes: 0 compiled, also if it does not fit, 1 the compiler failed, 2 the request was wrong."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; ``args.command`` becomes :func:`run`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "step",
        metavar="FILE.py:FUNCTION|FILE",
        help="FUNCTION returns (step, inputs); FILE is saved StableHLO",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of FUNCTION, a Python literal or text; may be repeated",
    )
    add_compiler_flags(parser)
    parser.set_defaults(command=run)


def add_compiler_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that compiles for a TPU."""
    add = parser.add_argument
    add(
        "--topology",
        default="v5e:1x1",
        metavar="SLICE",
        help="generation and chips, such as v5e:1x1 (Colab), v5e:2x4 (Kaggle), v6e:1x1, "
        "tpu7x:2x2x1 (needs a newer compiler); an unknown name lists all (default: v5e:1x1)",
    )
    add(
        "--num-cores",
        type=int,
        metavar="N",
        help="cores of the slice to use (default: all; of a saved program what it says)",
    )
    add_compiler_choice(parser)
    add(
        "--effort",
        choices=EFFORTS,
        default="fast",
        help="fast: the compiler's least effort, a minute; full: what a TPU gets, much longer "
        "(default: fast)",
    )
    add("--no-cache", action="store_true", help=f"compile again (answers kept: {cache_folder()})")
    add("--json", action="store_true", help="print everything as one JSON object")


def add_compiler_choice(parser: argparse.ArgumentParser) -> None:
    """Add ``--compiler``."""
    parser.add_argument(
        "--compiler",
        metavar="PYTHON",
        help="a Python that has jax and libtpu, such as newest/bin/python, to compile with its "
        "libtpu (default: the variable TPUSCOPE_COMPILER, else this Python)",
    )


def run(args: argparse.Namespace) -> int:
    """Trace or read, compile, print; return the exit code.

    Raises:
        RequestError: FILE, FUNCTION, what it returns, a flag, or an installation is wrong.
        Failed: the compiler gave no answer.
    """
    path, _, function = args.step.rpartition(":")
    is_step = function.isidentifier() and path.endswith(".py")
    if not is_step and args.step.endswith(".py"):
        raise RequestError(f"{args.step}: must be FILE.py:FUNCTION", "step-name")
    if not Path(path if is_step else args.step).is_file():
        raise RequestError(f"{path if is_step else args.step}: no such file", "no-such-file")
    report = (_of_step if is_step else _of_file)(args)
    if args.json:
        print(json.dumps({"step": args.step} | report.as_dict()))
    else:
        sys.stdout.write(f"{args.step}\n{report.table()}\n")
    return 0


def _of_step(args: argparse.Namespace) -> "Report":
    """Trace the function's step, and compile it."""
    from ..engine.torch_xla import XlaUnavailable, require_matching_versions
    from . import file_step
    from .compiler import compile_program, require_compiler
    from .tracing import in_new_process

    arguments = dict(map(_argument, args.arg))
    slice_ = _slice(args)
    cores = slice_.cores if args.num_cores is None else args.num_cores
    python = require_compiler(args.compiler, slice_).python
    try:
        require_matching_versions()
    except XlaUnavailable as error:
        raise RequestError(str(error), "not-installed") from error
    path, _, function = args.step.rpartition(":")
    program = in_new_process(file_step.trace_file, path, function, arguments, cores)
    return compile_program(
        program, str(slice_), cores, args.effort, not args.no_cache, compiler=python
    )


def _of_file(args: argparse.Namespace) -> "Report":
    """Compile the saved program."""
    from .compiler import WrongProgram, compile_program
    from .saved import read_program

    if args.arg:
        raise RequestError("--arg: only FILE.py:FUNCTION takes arguments", "flag")
    slice_ = _slice(args)
    program = read_program(args.step)
    try:
        return compile_program(
            program,
            str(slice_),
            args.num_cores,
            args.effort,
            not args.no_cache,
            compiler=args.compiler,
        )
    except WrongProgram as error:
        raise RequestError(f"{args.step}: {error}", error.code) from error


def _slice(args: argparse.Namespace) -> Topology:
    slice_ = Topology.parse(args.topology)
    if args.num_cores is not None and not 1 <= args.num_cores <= slice_.cores:
        raise RequestError(
            f"--num-cores {args.num_cores}: {slice_} has 1 to {slice_.cores}", "range"
        )
    return slice_


def _argument(text: str) -> tuple[str, object]:
    """Return name and value of ``NAME=VALUE``."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise RequestError(f"--arg {text}: must be NAME=VALUE", "flag")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
