"""``tpuscope rehearse SCRIPT``: a TorchTPU script on this machine's CPU, without a TPU."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from . import versions
from .engine import autoload, cpu_plugin
from .errors import RequestError

EPILOG = f"""\
The script's device `tpu` computes on the CPU, through XLA: a CPU plugin stands in libtpu's place.
That arrangement is tpuscope's, not Google's. It shows what a program computes and how many programs
it compiles; it shows nothing of a TPU's speed, memory or rounding, and there is one device.

It needs an environment without torch_xla:
    {versions.install_torch_tpu()} {cpu_plugin.PACKAGE}=={cpu_plugin.VERSION}

examples:
    tpuscope rehearse train.py --epochs 1
    tpuscope rehearse train.py -- --help        what follows -- goes to the script"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(command=_command)


def _command(args: argparse.Namespace) -> int:
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    rehearse(Path(args.script), arguments)
    return 0


def rehearse(script: Path, arguments: list[str]) -> None:
    """Run a script with TorchTPU's device on the CPU; report programs on standard error.

    Raises:
        RequestError: there is no such script, or TorchTPU or the plugin is not installed.
    """
    if not script.is_file():
        raise RequestError(f"{script}: no such file; name a Python script", "no-file")
    os.environ["PJRT_DEVICE"] = "CPU"
    autoload.switch_off()
    from .engine import torch_tpu

    torch_tpu.device()
    _say(f"{torch_tpu.describe()}; no TPU is used")
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    before, asked = torch_tpu.counters(), torch_tpu.requests()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch_tpu.wait()
        compiled = (torch_tpu.counters() - before).compilations
        _say(f"{compiled} programs compiled; eager operations: {torch_tpu.requests() - asked}")


def _say(text: str) -> None:
    print(f"tpuscope rehearse: {text}", file=sys.stderr, flush=True)
