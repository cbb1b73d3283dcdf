"""The commands ``mshnet train|test|predict|check-data|doctor|aot|bench`` and main_tpu.py's flags.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong (one line says what to change),
129, 130 and 143 stopped by SIGHUP, Ctrl-C and SIGTERM after saving.

What computes (torch, the network, the data) is imported by the functions that need it, so that
``--help``, ``--version`` and argument errors answer at once.
"""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpuscope.aot import EFFORTS
from tpuscope.aot.command import add_compiler_choice
from tpuscope.cli import Parser, run
from tpuscope.errors import RequestError
from tpuscope.version import __version__

from .choices import CACHES, DEVICES, ENGINES, PHASES, PRECISIONS, STRATEGIES
from .doctor import add_flags as doctor_flags
from .training.config import MOST_WORKERS, Config, default_workers

if TYPE_CHECKING:
    from . import estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the installed command ``mshnet`` and return the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:  # its flags are defined beside its code
        return run(_Bench(prog="mshnet bench"), argv[1:])
    return run(_parser(), argv)


def main_tpu(argv: Sequence[str] | None = None) -> int:
    """Run ``python main_tpu.py`` (train, or test with ``--mode test``) and return the exit code."""
    parser = Parser(
        prog="main_tpu.py",
        description="Train or test MSHNet, an infrared small-target detector.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mode", choices=("train", "test"), default="train", help="what to do (default: train)"
    )
    _add_train_flags(parser)
    _add_json(parser, "print the result as one JSON object on standard output")
    parser.set_defaults(command=_train_or_test)
    return run(parser, argv)


_EXAMPLES = """\
examples:
  one TPU core, as in Colab:
      main_tpu.py --dataset-dir datasets/IRSTD-1k --batch-size 32 --use-tpu
  XLA without a TPU, small:
      PJRT_DEVICE=CPU main_tpu.py --epochs 3 --base-size 64 --crop-size 64 --use-tpu
  eight cores, as on Kaggle; without a TPU, put PJRT_DEVICE=CPU before the line:
      main_tpu.py --dataset-dir datasets/IRSTD-1k --batch-size 256 --use-tpu --num-cores 8
  two processes on this machine, or on two machines with two each (see torchrun --help):
      torchrun --nproc-per-node 2 main_tpu.py --dataset-dir datasets/IRSTD-1k --batch-size 32
  a session that may be cut off; the same line starts and resumes the run:
      main_tpu.py --dataset-dir /content/drive/MyDrive/IRSTD-1k.zip --stage --use-tpu \\
          --save-dir /content/drive/MyDrive/runs/first --resume auto
  evaluate trained weights:
      main_tpu.py --mode test --dataset-dir DIR --weight-path weight.pkl

Without --dataset-dir it trains on built-in synthetic scenes. A run leaves config.json,
metrics.jsonl, weight.pkl (best), checkpoint.pkl (last), curves.png and examples.png in its folder.
exit codes: 0 done, 1 failed while running, 2 the request was wrong, 129, 130 and 143 stopped by
SIGHUP, Ctrl-C and SIGTERM after saving."""


class _Bench(Parser):
    """Passes the flags of ``mshnet bench`` to benchmarks/bench.py, which only a checkout has."""

    def parse_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        folder = Path(__file__).resolve().parent.parent / "benchmarks"
        if not (folder / "bench.py").is_file():
            raise RequestError(
                "the benchmarks are in the repository, not in the installed package; clone it and "
                "run `pip install -e .` there",
                "needs-checkout",
            )
        sys.path.insert(0, str(folder))
        bench = importlib.import_module("bench")
        namespace = namespace or argparse.Namespace()
        namespace.command = lambda _: bench.main(args)
        return namespace


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mshnet", description="Train, test and use MSHNet on TPU, CUDA and CPU.")
    parser.add_argument("--version", action="version", version=f"mshnet {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, function: Callable | None, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function)
        return sub

    train = command("train", _train, "train on a data set or on built-in scenes")
    train.epilog = (
        _EXAMPLES.replace("main_tpu.py --mode test", "mshnet test")
        .replace("--nproc-per-node 2 main_tpu.py", "--nproc-per-node 2 -m mshnet train")
        .replace("main_tpu.py", "mshnet train")
    )
    _add_train_flags(train)
    _add_json(train, "print the best epoch as one JSON object on standard output")

    test = command("test", _test, "evaluate weights on a test split, in both definitions")
    _add_data_flags(test)
    _add_device_flags(test)
    _add_weights(test, "weights to evaluate: weight.pkl, checkpoint.pkl, or official ones")
    _add_json(test, "print the numbers as one JSON object on standard output")

    predict = command("predict", _predict, "detect targets in image files")
    predict.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, 'patterns*'")
    predict.add_argument("--out", default="predictions", help="folder (default: predictions)")
    _add(predict, "base_size", "side of the network's input, pixels")
    _add(predict, "batch_size", "images at a time", default_text="8")
    _add_channels(predict)
    _add_device_flags(predict, cores=False)
    _add_weights(predict, "weights to use")
    _add_json(predict, "print the detections as one JSON array on standard output")

    check = command("check-data", _check_data, "report on a data set before training")
    check.add_argument("folder", help="folder with images/, masks/ and the lists")
    _add_json(check, "print the whole report as one JSON object")

    doctor_flags(command("doctor", None, "check this machine, and how to fix what does not work"))

    _add_aot_flags(command("aot", _aot, "estimate memory and time of a step by the TPU's compiler"))
    command("bench", None, "benchmark against the official implementation")
    return parser


def _add_aot_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _AOT_EXAMPLES
    parser.add_argument(
        "--topology",
        default="v5e:1x1",
        metavar="SLICE",
        help="generation and chips, such as v5e:1x1 (Colab), v5e:2x4 (Kaggle), v6e:1x1, "
        "tpu7x:2x2x1 (needs a newer compiler); an unknown name lists all (default: v5e:1x1)",
    )
    parser.add_argument(
        "--num-cores",
        type=int,
        default=None,
        metavar="N",
        help="cores of the slice that are used (default: all)",
    )
    _add(
        parser,
        "batch_size",
        "global batch: images a step, over all cores",
        default_text="32, or the next multiple of the cores",
    )
    _add(parser, "base_size", "side of the images, pixels")
    _add(parser, "precision", "bf16 is autocast", kind=str, choices=PRECISIONS)
    _add_fold(parser)
    _add_channels(parser)
    parser.add_argument(
        "--phase",
        choices=PHASES,
        default="train",
        help="train: all heads; warmup: one head; eval: an evaluation step (default: train)",
    )
    add_compiler_choice(parser)
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        default="fast",
        help="fast: the compiler's least effort, about a minute; full: as for a TPU, much longer "
        "(default: fast)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="search for the largest batch that fits, starting at --batch-size",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="compile again, even if the answer is in the cache",
    )
    _add_json(parser, "print everything as one JSON object")


_AOT_EXAMPLES = """\
libtpu contains the whole TPU compiler, which needs no TPU. The training step is traced as in a
training run, compiled for the slice that you name, and the compiled program is analysed:

  memory    whether it fits, with the largest arrays if not
  moved     bytes to and from HBM; layer by layer, and how much of it is padding
  at least  roofline bound: operations or bytes at the chip's published rates
  exchanged what several cores reduce together

It is an estimate, not a measurement: no step is faster than "at least", and many are slower.

examples:
  will batch 32 fit Colab's v5e?
      mshnet aot --topology v5e:1x1 --batch-size 32 --precision bf16
  the largest batch that fits:
      mshnet aot --topology v5e:1x1 --batch-size 64 --precision bf16 --sweep
  Kaggle's eight cores, and what they exchange:
      mshnet aot --topology v5e:2x4 --batch-size 256 --precision bf16

Compiling a step at 256×256 takes about a minute and 3 GB of memory. Install the compiler with
pip install 'mshnet[aot]'; Colab's TPU runtime has it."""


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    _add_data_flags(parser)
    parser.add_argument(
        "--stage",
        action="store_true",
        default=argparse.SUPPRESS,
        help="copy (or unpack: zip, tar) the data set to ./datasets once, for data sets on Drive",
    )
    _add(parser, "epochs", "passes over the training split")
    _add(parser, "lr", "learning rate of Adagrad", kind=float)
    _add(parser, "warm_epoch", "last epoch of the warm-up (one head, IoU loss), counted from 0")
    _add(parser, "crop_size", "side of training samples, pixels, a multiple of 16")
    _add(
        parser,
        "workers",
        "loader processes",
        default_text=f"cores - 1, at most {MOST_WORKERS}; here {default_workers()}",
    )
    _add(parser, "seed", "random seed of weights, order, augmentation and dropout")
    _add_device_flags(parser)
    _add_weights(parser, "train: weights to start from; test: weights to evaluate")
    _add(
        parser,
        "strategy",
        "several cores: spmd, one program over all; launch, one process and batch norm for each",
        kind=str,
        choices=STRATEGIES,
    )
    _add(parser, "save_dir", "folder of the run", kind=str, default_text="weight/MSHNet-<time>")
    _add(
        parser,
        "backup",
        "second folder, such as one on Drive, to which the run's files are copied in the "
        "background; a --save-dir on Drive becomes the backup of a local folder",
        kind=str,
        default_text="none",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a run with its own settings: its folder, its backup or a checkpoint.pkl; "
        "`auto` continues the run in --save-dir or --backup, or starts one if there is none",
    )
    _add(parser, "save_minutes", "minutes between checkpoints within an epoch", kind=float)
    _add(
        parser,
        "max_minutes",
        "save and stop before the session has lasted this many minutes",
        kind=float,
        default_text="no limit",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "dataset_dir",
        "folder with images/, masks/ and lists",
        kind=str,
        default_text="built-in scenes",
    )
    _add(
        parser,
        "batch_size",
        "global batch: images a step, over all cores or processes",
        default_text="4; with --num-cores or torchrun the next multiple of their number",
    )
    _add(parser, "base_size", "side of evaluation images, and scale of augmentation, pixels")
    _add_channels(parser)
    _add(parser, "cache", "where decoded images are stored", kind=str, choices=CACHES)


def _add_channels(parser: argparse.ArgumentParser) -> None:
    _add(parser, "channels", "of an image: 1 grey, 3 colour")


def _add_device_flags(parser: argparse.ArgumentParser, cores: bool = True) -> None:
    _add(
        parser,
        "device",
        "tpu is XLA; auto takes a TPU, then CUDA, then the CPU",
        kind=str,
        choices=DEVICES,
    )
    parser.add_argument(
        "--use-tpu",
        dest="device",
        action="store_const",
        const="tpu",
        default=argparse.SUPPRESS,
        help="same as --device tpu; with PJRT_DEVICE=CPU set, XLA on the CPU",
    )
    _add(
        parser,
        "engine",
        "what computes on a TPU: torch_xla (2.9, Colab's) or torch_tpu (TorchTPU, its successor); "
        "auto takes the one that is installed",
        kind=str,
        choices=ENGINES,
    )
    if cores:
        _add(parser, "num_cores", "TPU cores of this machine; with PJRT_DEVICE=CPU, virtual ones")
    _add(parser, "precision", "bf16 is autocast", kind=str, choices=PRECISIONS)
    _add_fold(parser)
    _add(
        parser,
        "compile_cache",
        "folder for compiled XLA programs, reused by later runs where the runtime supports it",
        kind=str,
        default_text="none",
    )


def _add_fold(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "space_to_depth",
        "space-to-depth factor; 0 = standard layers; the results are the same",
        default_text="on a TPU 8 below 128 images a core, else 1; on other devices 0",
    )


def _add_weights(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--weight-path", metavar="FILE", default=argparse.SUPPRESS, help=text)


def _add_json(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _add(
    parser: argparse.ArgumentParser,
    name: str,
    text: str,
    kind: Callable = int,
    choices: Sequence[str] | None = None,
    default_text: str | None = None,
) -> None:
    """Add a flag for a field of Config; left out, it sets nothing: a resumed run keeps its own."""
    shown = default_text or Config.__dataclass_fields__[name].default
    parser.add_argument(
        "--" + name.replace("_", "-"),
        type=kind,
        choices=choices,
        default=argparse.SUPPRESS,
        metavar=None if choices else {int: "N", float: "X"}.get(kind, "NAME"),
        help=f"{text} (default: {shown})",
    )


def _overrides(args: argparse.Namespace) -> dict:
    """Return the settings that the command line names."""
    return {k: v for k, v in vars(args).items() if k in Config.__dataclass_fields__}


def _computing(args: argparse.Namespace) -> dict:
    """Return :func:`_overrides`, with this process prepared for the device that they name."""
    from .training.devices import resolve_device
    from .training.malloc import keep_freed_memory

    overrides = _overrides(args)
    engine = overrides.get("engine", "auto")
    with contextlib.suppress(RequestError):  # reported where the whole request is known
        if resolve_device(overrides.get("device", "auto"), engine=engine) == "cpu":
            keep_freed_memory()
    return overrides


def _log(args: argparse.Namespace) -> Callable[[str], None]:
    """Return where messages go: standard output, or standard error when that carries JSON."""
    return _to_stderr if args.json else _to_stdout


# Text and line end in one write: the backup's thread and other replicas write, too. Functions of
# the module, because replicas unpickle them.


def _to_stdout(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


def _to_stderr(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def _print_json(value: object) -> None:
    from .training.run_dir import to_json

    print(to_json(value))


def _train(args: argparse.Namespace) -> int:
    from . import api
    from .training.preemption import EXIT_CODES

    record = api.train(_computing(args), args.resume, _log(args))
    if args.json:
        _print_json(record)
    return EXIT_CODES.get(record["stopped"], 0)


def _train_or_test(args: argparse.Namespace) -> int:
    if args.mode == "train":
        return _train(args)
    if args.resume:
        raise RequestError(
            f"--mode test --resume {args.resume}: a test resumes nothing; name the weights with "
            "--weight-path",
            "flag",
        )
    return _test(args)


def _test(args: argparse.Namespace) -> int:
    from . import api

    results = api.test(_computing(args), _log(args))
    if args.json:
        _print_json(results)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from . import api

    overrides = {"batch_size": 8} | _computing(args)
    rows = api.predict_files(overrides, args.inputs, Path(args.out), _log(args))
    if args.json:
        _print_json(rows)
    return 0


def _check_data(args: argparse.Namespace) -> int:
    from .data.check import check, table

    report = check(args.folder)
    if args.json:
        _print_json(report.as_dict())
    else:
        print(table(report))
    return 2 if report.errors() else 0


def _aot(args: argparse.Namespace) -> int:
    from . import estimate

    overrides = _overrides(args)
    num_cores = overrides.pop("num_cores")
    step = estimate.request(overrides, args.phase, args.topology, num_cores, args.compiler)
    log = _log(args)
    if args.sweep:
        return _aot_sweep(step, args, log)
    report = estimate.compile_step(step, args.effort, not args.no_cache)
    if args.json:
        _print_json(step.as_dict() | report.as_dict())
    else:
        log(f"MSHNet, {step}\n{report.table()}")
    return 0


def _aot_sweep(step: "estimate.Step", args: argparse.Namespace, log: Callable[[str], None]) -> int:
    from . import estimate

    log(f"MSHNet, {step}; estimated by the TPU's compiler ({args.effort} effort)\n")
    log(estimate.SWEEP_HEAD)
    tried = []
    for found in estimate.sweep(step, args.effort, not args.no_cache):
        tried.append(found)
        log(estimate.sweep_line(*found))
    log(f"\n{estimate.sweep_summary(tried)}")
    if args.json:
        best = estimate.largest(tried)
        _print_json({
            "largest_batch_size": best.config.batch_size if best else None,
            "tried": [step.as_dict() | report.as_dict() for step, report in tried],
        })  # fmt: skip
    return 0
