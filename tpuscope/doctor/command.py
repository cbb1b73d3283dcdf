"""``mshnet doctor`` on the command line."""

import argparse
import json
from collections.abc import Callable

from ..errors import RequestError
from . import doctor
from .report import TARGETS

EPILOG = """\
examples:
  what works here, and how to mend what does not:
      mshnet doctor
  before a long training, with its data and its folder:
      mshnet doctor --require tpu --cores 8 --dataset-dir DIR --save-dir runs/first
  for a program:
      mshnet doctor --json
  is the Cloud TPU that was just created ready? (asks Google's service, from any machine)
      mshnet doctor --cloud NAME --zone us-west4-a --project PROJECT --wait 20

Each device is opened in a process of its own and is free afterwards. Where nothing starts any more
because a package is broken, `python -m tpuscope.doctor` takes the same flags and needs neither
torch nor any other package.

--cloud asks for state, health, type and addresses of a TPU by its name, with cloud-tpu-client
(pip install 'mshnet[cloud]') and the credentials of `gcloud auth application-default login`. It has
no role on the machine that the TPU hangs on, such as Colab's: there `mshnet doctor` looks itself.

exit codes: 0 usable (with --require and --cores: what they ask for; otherwise anything that can
train, and the CPU can), 1 not usable, 2 the request was wrong."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the command; ``args.command`` becomes :func:`run`."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--require", choices=TARGETS, help="what has to work; xla is a TPU, or the CPU through XLA")
    add(
        "--cores", type=int, default=1, metavar="N", help="cores that have to be there (default: 1)"
    )
    add("--dataset-dir", metavar="DIR", help="data set to read and check")
    add("--save-dir", metavar="DIR", help="folder of a run: can it be written, is there room")
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
        help="wait so long at most until it is ready and healthy (default: 0)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Do what the flags ask; returns the exit code.

    Raises:
        RequestError: they ask for what cannot be.
    """
    if args.cloud is not None:
        return _ask_the_service(args)
    for name in ("zone", "project", "wait"):
        if getattr(args, name):
            raise RequestError(f"--{name} {getattr(args, name)}: is for --cloud NAME; add that")
    log: Callable[[str], None] = (lambda text: None) if args.json else print
    report = doctor(
        args.require,
        args.cores,
        args.dataset_dir,
        args.save_dir,
        args.compile_cache,
        args.timeout,
        log,
    )
    if args.json:
        print(json.dumps(report.as_dict()))
    return 0 if report.usable else 1


def _ask_the_service(args: argparse.Namespace) -> int:
    from .service import ask

    return ask(args.cloud, args.zone, args.project, args.wait, args.json)
