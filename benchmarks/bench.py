"""Compare the official MSHNet implementation with this project's, side by side, in one run.

Each row does the same work in both implementations on the same data, in turns, and checks that the
numbers agree before it measures. The official one is rewritten in benchmarks/official.py and
official_data.py: modules for upsampling and pooling, a loss that loops over samples, a loader that
decodes every sample again to float32 RGB, metrics of one image at eleven thresholds with copies to
the host, loss.item() at every step. --official compares with a checkout of the official code.

A ratio is how many times better ours is, by the medians; beside it its smallest and largest value
of one round. Seconds are those of this machine and mean nothing elsewhere. No TPU is used: XLA runs
on the CPU, and tpu_bytes is the TPU compiler's account.

    mshnet bench                                    all rows, on built-in scenes
    mshnet bench --dataset-dir datasets/SIRST       the same on real images
    mshnet bench --only loader evaluation_cpu
    mshnet bench --scaling-curves figures                   how cost grows, as figures in a folder
    mshnet bench --device cuda                      the training step on this machine's GPU
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import measure
import reference
import scaling_curves
import torch

from mshnet import RequestError
from mshnet.data import source
from mshnet.data.layout import DataFolder
from mshnet.training.config import Config

ON_GPU = ("cuda_step",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mshnet bench``; return the exit code."""
    try:
        args = _parser().parse_args(argv)
        settings = _settings(args)
        chosen = _chosen(args)
    except RequestError as error:
        print(f"mshnet bench: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    about = measure.machine()
    log = sys.stderr if args.json else sys.stdout
    print(_head(about, settings), file=log, flush=True)
    if about["load"] > 0.5 * about["cores"]:
        print(f"this machine is busy (load {about['load']}): expect a wide spread", file=log)
    if args.scaling_curves:
        for path in scaling_curves.draw(
            settings, Path(args.scaling_curves), lambda text: print(text, file=log)
        ):
            print(path, file=log)
        return 0
    found, failed = [], []
    for name in chosen:
        start = time.perf_counter()
        try:
            made = measure.alone(cases.ROWS[name], settings)
        except Exception as error:
            failed.append(name)
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
            continue
        found += made
        print(*map(line, made), sep="\n", file=log, flush=True)
        print(f"{'':16}{name} took {time.perf_counter() - start:.0f} s", file=log, flush=True)
    unmeasured = [] if torch.cuda.is_available() else list(ON_GPU)
    print(f"\n{markdown(found)}", file=log)
    if unmeasured:
        print(f"not measured, because this machine has no GPU: {', '.join(unmeasured)}", file=log)
    print(json.dumps(as_dict(found, about, settings, unmeasured, failed)))
    return 1 if failed else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise RequestError(f"{message} (`mshnet bench --help` lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mshnet bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--dataset-dir", metavar="NAME", help="default: built-in scenes")
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", help=f"of {', '.join(cases.ROWS)}; default: all"
    )
    defaults = cases.Settings("")
    for name, text in (
        ("size", "side of the images, pixels"),
        ("batch_size", "images a step"),
        ("rounds", "turns that each way takes"),
        ("epoch_size", "side of the images in the row epoch, pixels"),
        ("images", "most images in a round of loader and evaluation_cpu"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int,
            metavar="N",
            default=default,
            help=f"{text} (default: {default})",
        )
    for name in ("widths", "depths"):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs=5,
            metavar="N",
            default=getattr(defaults, name),
            help=f"{name} of the network's levels (default: the official ones)",
        )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: only the training step, on this machine's GPU (default: cpu)",
    )
    parser.add_argument(
        "--official", metavar="PATH", help="a checkout of the official code to compare with"
    )
    parser.add_argument(
        "--scaling-curves",
        metavar="FOLDER",
        help="measure how cost grows instead, and draw it there",
    )
    parser.add_argument("--json", action="store_true", help="only the JSON line on standard output")
    return parser


def _settings(args: argparse.Namespace) -> cases.Settings:
    """Return the settings; refuse what cannot work before anything is measured."""
    for name in ("size", "epoch_size"):
        Config(base_size=getattr(args, name))  # a multiple of 16
    for name in ("batch_size", "rounds", "images"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise RequestError(f"{flag} {getattr(args, name)}: must be at least 1")
    if args.official:
        reference.require_checkout(args.official)
    folder = args.dataset_dir or str(source.built_in_scenes(args.size))
    count = {split: len(DataFolder(folder).samples(split)) for split in ("train", "test")}
    if min(count["train"], args.images) < args.batch_size:
        raise RequestError(
            f"--batch-size {args.batch_size}: more than the {min(count['train'], args.images)} "
            "training images; take a smaller one"
        )
    names = ("size", "batch_size", "rounds", "epoch_size", "images")
    return cases.Settings(
        folder=str(Path(folder).resolve()),
        checkout=args.official,
        widths=tuple(args.widths),
        depths=tuple(args.depths),
        **{name: getattr(args, name) for name in names},
    )


def _chosen(args: argparse.Namespace) -> list[str]:
    """Return the names of the rows to run."""
    on_gpu = args.device == "cuda"
    chosen = args.only or [name for name in cases.ROWS if (name in ON_GPU) == on_gpu]
    unknown = [name for name in chosen if name not in cases.ROWS]
    if unknown:
        raise RequestError(f"--only {' '.join(unknown)}: choose of {', '.join(cases.ROWS)}")
    if set(chosen) & set(ON_GPU) and not torch.cuda.is_available():
        raise RequestError(
            f"{'--device cuda' if on_gpu else '--only ' + ON_GPU[0]}: PyTorch finds no CUDA GPU; "
            "check `nvidia-smi`, or leave it out to compare on the CPU"
        )
    return chosen


def line(row: measure.Row) -> str:
    """Return a row as one line of text."""
    low, high = row.spread
    goal = f"goal {row.goal:g}" if row.goal else ""
    return f"{row.key:16}{row.ratio:8.2f}×  ({low:.2f} to {high:.2f})  {goal:8}  {row.title}"


def markdown(found: list[measure.Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| row | work | official | ours | ratio | of one round | goal |", "|---" * 7 + "|"]
    for row in found:
        values = (_value(sorted(v)[len(v) // 2], row.unit) for v in (row.official, row.ours))
        low, high = row.spread
        verdict = ""
        if row.goal:
            verdict = f"{row.goal:g}× {'met' if row.ratio >= row.goal else 'NOT MET'}"
        cells = [f"`{row.key}`", row.title, *values, f"**{row.ratio:.2f}×**",
                 f"{low:.2f} to {high:.2f}", verdict]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    checks = [f"`{row.key}`: {row.checked}" for row in found if row.checked]
    notes = [f"`{row.key}`: {row.note}" for row in found if row.note]
    return "\n".join([*lines, "", "equal: " + "; ".join(checks), "", "notes: " + "; ".join(notes)])


def _value(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB" if value > 1e9 else f"{value / 1e3:,.0f} kB"
    return f"{value:,.0f}/s" if unit.endswith("/s") else f"{value:.3g} {unit}"


def as_dict(
    found: list[measure.Row],
    about: dict,
    settings: cases.Settings,
    unmeasured: list[str],
    failed: list[str],
) -> dict[str, Any]:
    """Return the values of the JSON line."""
    return {
        "ratios": {row.key: round(row.ratio, 3) for row in found},
        "met": {row.key: row.ratio >= row.goal for row in found if row.goal},
        "rows": [row.as_dict() for row in found],
        "not measured": unmeasured,
        "failed": failed,
        "machine": about,
        "settings": vars(settings),
    }


def _head(about: dict, settings: cases.Settings) -> str:
    versions = ", ".join(f"{k} {about[k]}" for k in ("python", "torch", "torch_xla"))
    way = settings.checkout or "benchmarks/official.py"
    return (
        f"{about['cpu']}, {about['cores']} cores, {versions}; official implementation: {way}; "
        f"data: {settings.folder}"
    )


if __name__ == "__main__":
    sys.exit(main())
