"""The command ``tpuscope``, and what every command line over this package shares.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong (one line names the fix),
130 interrupted by Ctrl-C.
"""

import argparse
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from . import torchrun
from .engine import autoload
from .errors import Failed, RequestError, printable
from .version import __version__


class Parser(argparse.ArgumentParser):
    """Reports an argument error as one line; accepts no abbreviated flag; has ``--debug``."""

    def __init__(self, **kwargs):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error, too",
        )

    def error(self, message: str):
        """Raise a :class:`RequestError` instead of printing the usage."""
        raise RequestError(f"{message} (`{self.prog} --help` lists the flags)", "flag")


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that the arguments name; print one line for what went wrong.

    Args:
        parser: its commands set ``command``, a function from the parsed arguments to an exit code.
        argv: the arguments; None for the process's own.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal can show "×" or any file name
            stream.reconfigure(errors="backslashreplace")
    autoload.switch_off()
    args = argparse.Namespace()
    try:
        _parse(parser, argv, args)
        return args.command(args)
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has ended. Standard output is pointed elsewhere, or Python
        # would complain about it while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message, code = _explain(error)
        if not code:
            raise
        if torchrun.launch() and _is_reported_elsewhere(error):
            return code
        if getattr(args, "debug", False):
            traceback.print_exc()
        print(f"{parser.prog}: {message}", file=sys.stderr)
        return code


def _parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, args: argparse.Namespace
) -> None:
    """Parse arguments; under torchrun a fault in them ends all processes, and one reports it.

    Raises:
        RequestError: an argument is wrong.
    """
    try:
        parser.parse_args(argv, args)
    except RequestError as error:
        if not torchrun.launch():
            raise
        from .engine.processes import joined

        fault = error
        with joined() as group:
            group.together(lambda: _raise(fault))


def _raise(error: Exception) -> None:
    raise error


def _is_reported_elsewhere(error: Exception) -> bool:
    """Prepare this process of a torchrun job for its end.

    Returns:
        Whether another process prints the error.
    """
    from .engine.processes import is_reported_elsewhere

    # torchrun sends it to the others as soon as one has ended, and they may have more to say.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return is_reported_elsewhere(error)


# What torch, XLA and torch's DataLoader write when the machine or the device runs out of memory.
_MEMORY = re.compile(r"out of memory|can't allocate memory|RESOURCE_EXHAUSTED", re.IGNORECASE)
_WORKER = re.compile(r"DataLoader worker \(pid.*?\) (is killed|exited)[^.]*")


def _explain(error: Exception) -> tuple[str, int]:
    """Return a message and an exit code; code 0 for an error that needs its traceback."""
    text = str(error)
    if isinstance(error, RequestError):
        return " ".join(text.split()), 2
    if isinstance(error, Failed | OSError):
        return printable(text), 1
    if isinstance(error, RuntimeError) and (found := _WORKER.search(text)):
        return f"{found[0]}; use fewer loader workers, or a machine with more memory", 1
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(text)):
        cause = next(iter(text.splitlines()), "")[:300]
        what = f"out of memory ({printable(cause)})" if cause else "out of memory"
        return f"{what}; use a smaller batch, smaller images or fewer loader workers", 1
    return "", 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the installed command ``tpuscope``; return the exit code."""
    # Imported here: a program that only needs `run` does not load the commands.
    from .aot.command import add_flags as aot_flags
    from .doctor.command import add_flags as doctor_flags
    from .rehearse import add_flags as rehearse_flags

    parser = Parser(prog="tpuscope", description="Tools for any PyTorch program on a TPU.")
    parser.add_argument("--version", action="version", version=f"tpuscope {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, summary: str, add_flags: Callable[[Parser], None]) -> None:
        description = summary[0].upper() + summary[1:] + "."
        add_flags(commands.add_parser(name, help=summary, description=description))

    command(
        "doctor", "check what works on this machine, and how to fix what does not", doctor_flags
    )
    command("aot", "compile a step for a TPU that is not there: memory, bytes, bound", aot_flags)
    command("rehearse", "run a TorchTPU script on this machine's CPU", rehearse_flags)
    return run(parser, argv)
