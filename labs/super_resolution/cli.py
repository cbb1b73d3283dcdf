"""The commands ``python -m labs.super_resolution train|upscale|detect|benchmark|check``.

Exit codes: 0 done, 1 failed while running, 2 the request was wrong (one line says what to change),
130 and 143 stopped by Ctrl-C and SIGTERM after saving.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from mshnet.cli import Parser, run
from mshnet.data.decode import read_image
from mshnet.predict import find_images
from mshnet.training.config import DEVICES
from mshnet.training.preemption import EXIT_CODES, signals
from mshnet.training.run_dir import require_writable
from tpuscope.errors import RequestError
from tpuscope.progress import progress

from . import benchmark, check, detect, pictures, quality, tiles, training
from .training import Settings

PROG = "python -m labs.super_resolution"

_EXAMPLES = f"""\
examples:
  does everything work here?
      {PROG} check
  train on built-in scenes, on whatever device is here:
      {PROG} train --save-dir weight/sr
  eight cores, as on Kaggle; without a TPU put PJRT_DEVICE=CPU before it:
      {PROG} train --device tpu --tpu-cores 8 --batch-size 128
  a session vanished:
      {PROG} train --resume weight/sr
  enlarge frames of any size:
      {PROG} upscale frames/*.png --weight-path weight/sr --out enlarged
  does it help to find targets?
      {PROG} detect --dataset-dir datasets/SIRST --seeds 3

exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 and 143 stopped by Ctrl-C
and SIGTERM after saving."""

_DETECT = """\
Generators and detectors are trained for each seed, and detectors are shown frames of full and low
resolution, the latter enlarged in several ways. detect.jsonl in --save-dir grows with each seed; a
command that was stopped goes on with the next seed that is missing."""

# Settings as flags: what they mean. Name, default and type are the field's.
_TRAIN = {
    "steps": "of both phases together",
    "content_steps": "of the first phase: the generator alone",
    "batch_size": "crops a step, over all cores together",
    "crop": "side of a crop, pixels of high resolution, a multiple of 16",
    "lr": "Adam's learning rate for a batch of 16; grows in proportion to the batch",
    "pixel": "weight of the pixel loss (L1)",
    "perceptual": "weight of the perceptual loss",
    "adversarial": "weight of the adversarial loss",
    "width": "channels of the generator",
    "blocks": "inverted residuals of the generator",
    "expansion": "of the channels within a block",
    "discriminator_width": "channels of the discriminator's first layer; the paper has 64",
    "log_every": "steps between two looks at the losses, each of which waits for the device",
    "save_minutes": "between checkpoints",
}
_FRAMES = {
    "size": "side of the frames, pixels",
    "scale": "2 or 4",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    return run(_parser(), argv)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        description="Super-resolution of infrared frames by a small GAN (lab 11).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, function: Callable, summary: str, epilog: str = "") -> Parser:
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function)
        return sub

    train = command("train", _train, "train generator and discriminator", _EXAMPLES)
    _add_data(train)
    _add(train, _TRAIN)
    _add(train, {"seed": "of weights and crops", "save_dir": "folder of the run"})
    _add_vgg(train)
    _add_device(train)
    cores = "TPU cores of this machine; with PJRT_DEVICE=CPU, virtual ones"
    _add(train, {"tpu_cores": cores})
    resume = "continue the run in this folder with the settings it has"
    train.add_argument("--resume", metavar="RUN", help=resume)

    upscale = command("upscale", _upscale, "enlarge image files of any size")
    upscale.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, 'patterns*'")
    upscale.add_argument("--out", default="enlarged", help="folder (default: enlarged)")
    weights = "a run's folder, or its generator.pkl"
    upscale.add_argument("--weight-path", required=True, metavar="PATH", help=weights)
    for name, text in (
        ("tile", "side of a tile, pixels of low resolution"),
        ("margin", "pixels at each of its borders that are not used"),
        ("blend", "pixels beside the margin that fade into the neighbour"),
        ("batch", "tiles at a time"),
    ):
        default = tiles.Tiling.__dataclass_fields__[name].default
        help_text = f"{text} (default: {default})"
        upscale.add_argument(f"--{name}", type=int, default=default, metavar="N", help=help_text)
    compared = "take the inputs as the truth: shrink them first, and print PSNR and SSIM"
    upscale.add_argument("--compare", action="store_true", help=compared)
    _add_device(upscale)

    find = command("detect", _detect, "ask whether upscaling helps MSHNet find targets", _DETECT)
    _add_data(find)
    _add(find, _TRAIN)
    _add_vgg(find)
    fields = detect.Experiment.__dataclass_fields__
    for name, flag, text in (
        ("epochs", "epochs", "passes of each detector over its frames"),
        ("batch_size", "detector-batch-size", "frames a step of a detector"),
        ("train", "train", "frames to train on, at most"),
        ("test", "test", "frames to score, at most"),
    ):
        default = fields[name].default
        help_text = f"{text} (default: {default or 'all'})"
        find.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=help_text)
    retrained = f"detectors to retrain, of {', '.join(detect.WAYS)} (default: %(default)s)"
    find.add_argument(
        "--train-on", default=",".join(detect.TRAINED_ON), metavar="WAY,WAY", help=retrained
    )
    find.add_argument("--seeds", type=int, default=1, metavar="N", help="how many (default: 1)")
    _add(find, {"seed": "the first one"})
    where = "folder of the results (default: weight/super-resolution-detect)"
    find.add_argument("--save-dir", default="weight/super-resolution-detect", help=where)
    _add_device(find)

    bench = command("benchmark", _benchmark, "time a step and a frame on every device that is here")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.add_argument(
        "--steps", type=int, default=5, metavar="N", help="timed after two (default: 5)"
    )
    _add(bench, {k: _TRAIN[k] for k in ("batch_size", "crop", "width", "blocks")} | _FRAMES)
    _add(bench, {"discriminator_width": _TRAIN["discriminator_width"]})

    look = command("check", _check, "try packages, device, operations and loading a model")
    _add_device(look)
    return parser


def _add(parser: argparse.ArgumentParser, flags: dict[str, str]) -> None:
    """Add flags for fields of Settings, without defaults, so that a resumed run's values hold."""
    for name, text in flags.items():
        default = Settings.__dataclass_fields__[name].default
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(default),
            default=argparse.SUPPRESS,
            metavar={int: "N", float: "X"}.get(type(default), "PATH"),
            help=f"{text} (default: {default})",
        )


def _add_data(parser: argparse.ArgumentParser) -> None:
    folder = "folder with images/, masks/ and lists (default: built-in scenes)"
    parser.add_argument("--dataset-dir", metavar="DIR", default=argparse.SUPPRESS, help=folder)
    _add(parser, _FRAMES)


def _add_vgg(parser: argparse.ArgumentParser) -> None:
    text = "state_dict of torchvision's vgg19 for the perceptual loss (default: fixed features)"
    parser.add_argument("--vgg", metavar="FILE", default=argparse.SUPPRESS, help=text)


def _add_device(parser: argparse.ArgumentParser) -> None:
    text = "auto is a TPU, then CUDA, then the CPU; tpu with PJRT_DEVICE=CPU set is XLA on the CPU"
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=argparse.SUPPRESS,
        help=f"{text} (default: auto)",
    )


def _overrides(args: argparse.Namespace) -> dict:
    return {k: v for k, v in vars(args).items() if k in Settings.__dataclass_fields__}


def _log(text: str) -> None:
    print(text, flush=True)


def _train(args: argparse.Namespace) -> int:
    with signals(_log) as stop:
        run = training.train(_overrides(args), args.resume, _log, stop)
    if run.backend.is_main_process and run.records:
        pictures.curves(run.records, run.folder / "curves.png")
    if run.stopped:
        _log(f"stopped by {run.stopped} after step {run.step}; go on with --resume {run.folder}")
    else:
        _log(f"generator: {run.folder / training.GENERATOR}, curves.png beside it")
    return EXIT_CODES.get(run.stopped, 0)


def _upscale(args: argparse.Namespace) -> int:
    tiling = tiles.Tiling(args.tile, args.margin, args.blend, args.batch)
    paths, out = find_images(args.inputs), Path(args.out)
    generator, _ = training.load_generator(args.weight_path)
    backend = training.open_backend(getattr(args, "device", "auto"))
    enlarge = tiles.Upscaler(generator, backend, tiling)
    if args.compare:
        scale = generator.scale
        truths = [_whole(read_image(path), scale, path) for path in paths]
        scores = quality.compare(truths, scale, generator=enlarge)
        _log(quality.table(scores))
        return 0
    require_writable("--out", out)
    for path in progress(paths, "enlarge"):
        Image.fromarray(enlarge(read_image(path))).save(out / f"{path.stem}.png")
    _log(f"{len(paths)} frames enlarged by {generator.scale}: {out}")
    return 0


def _whole(frame, scale: int, path: Path):
    """Crop to multiples of the scale."""
    rows, columns = (side // scale * scale for side in frame.shape)
    if min(rows, columns) < 7 * scale:  # scikit-image's SSIM has windows of 7 pixels
        raise RequestError(f"{path} is too small to be shrunk by {scale} and compared")
    return frame[:rows, :columns]


def _detect(args: argparse.Namespace) -> int:
    overrides = _overrides(args)
    folder = Path(overrides.pop("save_dir"))
    if args.seeds < 1:
        raise RequestError(f"--seeds {args.seeds}: must be at least 1")
    experiment = detect.Experiment(
        Settings.from_dict(overrides),
        args.train_on.split(","),
        args.epochs,
        args.detector_batch_size,
        train=args.train,
        test=args.test,
    )
    require_writable("--save-dir", folder)
    backend = training.open_backend(experiment.sr.device)
    _log(f"device: {backend.label}")
    _log(detect.table(detect.run(experiment, backend, folder, args.seeds, _log)))
    return 0


def _benchmark(args: argparse.Namespace) -> int:
    results = benchmark.run(_overrides(args), args.steps)
    _log(json.dumps(results) if args.json else benchmark.table(results))
    return 1 if any("error" in result for result in results) else 0


def _check(args: argparse.Namespace) -> int:
    rows = check.check(getattr(args, "device", "auto"))
    _log(check.table(rows))
    return 0 if all(row.fine for row in rows) else 1
