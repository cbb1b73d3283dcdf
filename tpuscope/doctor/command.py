"""``tpuscope doctor`` on the command line."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence

from ..errors import RequestError
from . import Lines, doctor
from .machine import Machine
from .report import TARGETS
from .software import NEEDED

EPILOG = """\
examples:
  what works here, and how to fix what does not:
      tpuscope doctor
  before a long run on eight cores:
      tpuscope doctor --require tpu --cores 8
  for a program:
      tpuscope doctor --json
  is the Cloud TPU that was just created ready? (asks Google's service, from any machine)
      tpuscope doctor --cloud NAME --zone us-west4-a --project PROJECT --wait 20

Each device is opened in its own process and is free afterwards. If a broken package keeps a command
from starting, `python -m tpuscope.doctor` still does: it needs neither torch nor any other package.

--cloud asks for state, health, type and addresses of a TPU by its name, with cloud-tpu-client and
the credentials of `gcloud auth application-default login`. It is not needed on the machine that the
TPU is attached to, such as Colab's.

exit codes: 0 usable (what --require and --cores ask for, or any device), 1 not usable,
2 the request was wrong."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags; ``args.command`` becomes :func:`run`."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--require", choices=TARGETS, help="what has to work; xla is a TPU, or the CPU through XLA")
    add("--cores", type=int, default=1, metavar="N", help="cores it must have (default: 1)")
    add("--compile-cache", metavar="DIR", help="folder of compiled programs to check")
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="for each device to open and compute (default: 120)",
    )
    add("--json", action="store_true", help="print one JSON object: usable, checks, environment")
    cloud = parser.add_argument_group("ask the Cloud TPU service instead")
    cloud.add_argument("--cloud", metavar="NAME", help="name of a Cloud TPU")
    cloud.add_argument("--zone", metavar="ZONE", help="its zone, such as us-west4-a")
    cloud.add_argument("--project", metavar="PROJECT", help="id of its Google Cloud project")
    cloud.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="MINUTES",
        help="wait at most this long until it is ready and healthy (default: 0)",
    )
    parser.set_defaults(command=run)


def run(
    args: argparse.Namespace,
    packages: Mapping[str, str] = NEEDED,
    extra: Sequence[tuple[str, Callable[[Machine], Lines]]] = (),
) -> int:
    """Do what the flags ask for; return the exit code.

    Args:
        args: parsed flags of :func:`add_flags`.
        packages: see :func:`tpuscope.doctor.doctor`.
        extra: see :func:`tpuscope.doctor.doctor`.

    Raises:
        RequestError: a flag's value is wrong, or another flag is missing.
        Failed: the Cloud TPU service gave no answer.
    """
    if args.cloud is not None:
        from . import cloud

        return cloud.ask(args.cloud, args.zone, args.project, args.wait, args.json)
    for name in ("zone", "project", "wait"):
        if getattr(args, name):
            raise RequestError(
                f"--{name} {getattr(args, name)}: only goes with --cloud NAME; add that", "flag"
            )
    log: Callable[[str], None] = (lambda text: None) if args.json else print
    report = doctor(
        args.require, args.cores, args.compile_cache, args.timeout, packages, extra, log
    )
    if args.json:
        print(json.dumps(report.as_dict()))
    return 0 if report.usable else 1
