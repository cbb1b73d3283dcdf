"""The commands: ``mshnet train|test|predict|check-data|doctor|aot|bench``, ``main_tpu.py``'s flags.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong (one line says what to change),
130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tpuscope.aot import EFFORTS, CompilerFailed, cache_folder
from tpuscope.cli import Parser, run
from tpuscope.errors import RequestError

from . import __version__, api, estimate
from .data.check import check, table
from .data.sample_cache import CACHES
from .doctor import add_flags as doctor_flags
from .training.config import DEVICES, MOST_WORKERS, PRECISIONS, STRATEGIES, Config, default_workers
from .training.preemption import EXIT_CODES
from .training.run_dir import to_json


def main(argv: Sequence[str] | None = None) -> int:
    """The installed command ``mshnet``; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:  # has its own flags, beside its code
        return run(_Bench(prog="mshnet bench"), argv[1:])
    return run(_parser(), argv)


def main_tpu(argv: Sequence[str] | None = None) -> int:
    """``python main_tpu.py``: train, or test with ``--mode test``; returns the exit code."""
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
  eight cores, as on Kaggle; without a TPU put PJRT_DEVICE=CPU before it:
      main_tpu.py --dataset-dir datasets/IRSTD-1k --batch-size 256 --use-tpu --num-cores 8
  a session that may vanish; the same line begins and goes on:
      main_tpu.py --dataset-dir /content/drive/MyDrive/IRSTD-1k.zip --stage --use-tpu \\
          --save-dir /content/drive/MyDrive/runs/first --resume auto
  the numbers of trained weights:
      main_tpu.py --mode test --dataset-dir DIR --weight-path weight.pkl

Without --dataset-dir it trains on built-in synthetic scenes. A run leaves config.json,
metrics.jsonl, weight.pkl (best), checkpoint.pkl (last), curves.png and examples.png in its folder.
exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 and 143 stopped by Ctrl-C
and SIGTERM after saving."""


class _Bench(Parser):
    """Leaves the flags of ``mshnet bench`` to benchmarks/bench.py, which only a checkout has."""

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:
        folder = Path(__file__).resolve().parent.parent / "benchmarks"
        if not (folder / "bench.py").is_file():
            raise RequestError(
                "the benchmarks are in the repository, not in the installed package; clone it and "
                "run `pip install -e .` there"
            )
        sys.path.insert(0, str(folder))
        import bench

        return argparse.Namespace(command=lambda _: bench.main(argv))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mshnet", description="Train, test and use MSHNet on TPU, CUDA and CPU.")
    parser.add_argument("--version", action="version", version=f"mshnet {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, function: Callable, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function)
        return sub

    train = command("train", _train, "train on a data set or on built-in scenes")
    train.epilog = _EXAMPLES.replace("main_tpu.py --mode test", "mshnet test").replace(
        "main_tpu.py", "mshnet train"
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

    doctor_flags(command("doctor", None, "check what works on this machine, and how to mend it"))

    _add_aot_flags(command("aot", _aot, "what a step needs on a TPU, from the TPU's own compiler"))
    command("bench", None, "compare with the official code's way of doing the same work")
    return parser


def _add_aot_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _AOT_EXAMPLES
    parser.add_argument(
        "--topology",
        default="v5e:1x1",
        metavar="SLICE",
        help="generation and chips, such as v5e:1x1 (Colab), v5e:2x4 (Kaggle), v6e:1x1; a name "
        "that is not known lists all (default: v5e:1x1)",
    )
    parser.add_argument(
        "--num-cores",
        type=int,
        default=None,
        metavar="N",
        help="cores of the slice that take part (default: all of them)",
    )
    _add(parser, "batch_size", "images a step, over all cores together", default_text="32")
    _add(parser, "base_size", "side of the images, pixels")
    _add(parser, "precision", "bf16 is autocast", kind=str, choices=PRECISIONS)
    _add_fold(parser)
    _add_channels(parser)
    parser.add_argument(
        "--phase",
        choices=estimate.PHASES,
        default="train",
        help="train: all heads; warmup: one head; eval: a test's step (default: train)",
    )
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        default="fast",
        help="fast: the compiler's least effort, a minute; full: what a TPU gets, much longer "
        "(default: fast)",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="from --batch-size on, look for the largest batch that fits; one line for each try",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help=f"ask the compiler even if it has answered before (answers: {cache_folder()})",
    )
    _add_json(parser, "print everything as one JSON object")


_AOT_EXAMPLES = """\
libtpu holds the whole TPU compiler, and compiling takes no TPU. The training step is traced as
always, compiled for the slice that you name, and the compiled program says what it needs:

  memory    whether it fits, with the largest arrays if not
  moved     bytes to and from HBM; layer by layer, and how much of it is padding
  at least  operations or bytes at the chip's published rates, whichever takes longer
  exchanged what several cores reduce together

It is an estimate, not a run: no step is faster than "at least", and many are slower.

examples:
  will batch 32 fit Colab's v5e?
      mshnet aot --topology v5e:1x1 --batch-size 32 --precision bf16
  the largest batch that does:
      mshnet aot --topology v5e:1x1 --batch-size 64 --precision bf16 --sweep
  Kaggle's eight cores, and what they exchange:
      mshnet aot --topology v5e:2x4 --batch-size 256 --precision bf16

A step takes the compiler about a minute and 3 GB of memory at 256×256. It comes with
pip install 'mshnet[aot]'; Colab's TPU runtime has it."""


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    _add_data_flags(parser)
    parser.add_argument(
        "--stage",
        action="store_true",
        default=argparse.SUPPRESS,
        help="copy (or unpack: zip, tar) the data set to ./datasets first, once; for sets on Drive",
    )
    _add(parser, "epochs", "passes over the training split")
    _add(parser, "lr", "learning rate of Adagrad", kind=float)
    _add(parser, "warm_epoch", "last epoch, from 0 (3 means four), of one head and plain IoU loss")
    _add(parser, "crop_size", "side of training samples, pixels, a multiple of 16")
    _add(
        parser,
        "workers",
        "loader processes",
        default_text=f"cores - 1, at most {MOST_WORKERS}; here {default_workers()}",
    )
    _add(parser, "seed", "of weights, order and augmentation")
    _add_device_flags(parser)
    _add_weights(parser, "train: weights to start from; test: weights to evaluate")
    _add(
        parser,
        "strategy",
        "several cores as one device (spmd), or a replica on each with its own batch norm (launch)",
        kind=str,
        choices=STRATEGIES,
    )
    _add(parser, "save_dir", "folder of the run", kind=str, default_text="weight/MSHNet-<time>")
    _add(
        parser,
        "backup",
        "second folder for the run's files, copied to in the background, such as one on Drive; "
        "a --save-dir on Drive gets a local folder and becomes the backup by itself",
        kind=str,
        default_text="none",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a run with the settings it has: its folder, its backup's, a checkpoint.pkl; "
        "`auto` continues what is in --save-dir or --backup, and begins a run if nothing is",
    )
    _add(parser, "save_minutes", "minutes between checkpoints within an epoch", kind=float)
    _add(
        parser,
        "max_minutes",
        "save and stop in time for a session of so many minutes",
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
    _add(parser, "batch_size", "images a step, over all cores together")
    _add(parser, "base_size", "side of evaluation images, and scale of augmentation, pixels")
    _add_channels(parser)
    _add(parser, "cache", "where decoded images are kept", kind=str, choices=CACHES)


def _add_channels(parser: argparse.ArgumentParser) -> None:
    _add(parser, "channels", "1 keeps images grey, 3 keeps colour")


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
    if cores:
        _add(parser, "num_cores", "TPU cores of this machine; with PJRT_DEVICE=CPU, virtual ones")
    _add(parser, "precision", "bf16 is autocast", kind=str, choices=PRECISIONS)
    _add_fold(parser)
    _add(
        parser,
        "compile_cache",
        "folder that keeps XLA programs between runs, where the runtime can load them",
        kind=str,
        default_text="none",
    )


def _add_fold(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "space_to_depth",
        "how the network computes, with the same result: 0 as on CPUs and GPUs, 1 to 16 as TPUs "
        "want it, with so many columns of a map stored as channels",
        default_text="on a TPU 8 below 128 images a core, else 1; elsewhere 0",
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
    """A flag for a field of Config; absent if not given, so that a resumed run's value holds."""
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
    """The settings that the command line names."""
    return {k: v for k, v in vars(args).items() if k in Config.__dataclass_fields__}


def _log(args: argparse.Namespace) -> Callable[[str], None]:
    """Where messages for people go: standard output, or beside it when that carries JSON."""
    return _beside if args.json else _on_stdout


# Text and line end in one write: the backup's thread and other replicas speak, too.


def _on_stdout(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


def _beside(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def _train(args: argparse.Namespace) -> int:
    record = api.train(_overrides(args), args.resume, _log(args))
    if args.json:
        print(to_json(record))
    return EXIT_CODES.get(record["stopped"], 0)


def _train_or_test(args: argparse.Namespace) -> int:
    if args.mode == "train":
        return _train(args)
    if args.resume:
        raise RequestError(
            f"--mode test --resume {args.resume}: testing resumes nothing; name the weights with "
            "--weight-path"
        )
    return _test(args)


def _test(args: argparse.Namespace) -> int:
    results = api.test(_overrides(args), _log(args))
    if args.json:
        print(to_json(results))
    return 0


def _predict(args: argparse.Namespace) -> int:
    rows = api.predict_files(
        {"batch_size": 8} | _overrides(args), args.inputs, Path(args.out), _log(args)
    )
    if args.json:
        print(to_json(rows))
    return 0


def _check_data(args: argparse.Namespace) -> int:
    report = check(args.folder)
    print(json.dumps(report.as_dict(), indent=1) if args.json else table(report))
    return 2 if report.errors() else 0


def _aot(args: argparse.Namespace) -> int:
    overrides = {"batch_size": 32} | _overrides(args)
    num_cores = overrides.pop("num_cores")
    step = estimate.request(overrides, args.phase, args.topology, num_cores)
    log = _log(args)
    try:
        if args.sweep:
            return _aot_sweep(step, args, log)
        report = estimate.compile_step(step, args.effort, not args.no_cache)
    except CompilerFailed as error:
        print(f"mshnet aot: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(to_json(step.as_dict() | report.as_dict()))
    else:
        log(f"MSHNet, {step}\n{report.table()}")
    return 0


def _aot_sweep(step: estimate.Step, args: argparse.Namespace, log: Callable[[str], None]) -> int:
    log(f"MSHNet, {step}; by the TPU's compiler ({args.effort} effort), not a run\n")
    log(estimate.SWEEP_HEAD)
    tried = []
    for found in estimate.sweep(step, args.effort, not args.no_cache):
        tried.append(found)
        log(estimate.sweep_line(*found))
    log(f"\n{estimate.sweep_summary(tried)}")
    if args.json:
        best = estimate.largest(tried)
        print(to_json({
            "largest_batch_size": best.config.batch_size if best else None,
            "tried": [step.as_dict() | report.as_dict() for step, report in tried],
        }))  # fmt: skip
    return 0
