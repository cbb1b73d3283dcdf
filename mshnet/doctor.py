"""``mshnet doctor``: the checks of :mod:`tpuscope.doctor`, and what training the detector needs."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from tpuscope import doctor as general
from tpuscope.doctor import command
from tpuscope.doctor.machine import Machine, existing
from tpuscope.doctor.report import TARGETS, Check, Report, ok, problem, refused, warning
from tpuscope.doctor.resources import write_fault
from tpuscope.doctor.software import NEEDED
from tpuscope.drives import is_remote
from tpuscope.engine.tpu_specs import CHIPS
from tpuscope.errors import RequestError
from tpuscope.files import cache_folder

PACKAGES = NEEDED | {
    "PIL.Image": "pillow",
    "scipy.ndimage": "scipy",
    "skimage.measure": "scikit-image",
}

# What a TPU core can take at most: its training step moves so many bytes to and from HBM, as
# `mshnet aot --topology v5e:1x1 --batch-size 32 --precision bf16` answers (fast effort, libtpu
# 0.0.21.1, 256×256). GUIDE.md, "What to expect: an estimate", shows the same number.
CORE_BATCH = 32
BYTES_PER_STEP = 30_033_166_336
FLOPS_PER_STEP = 5_347_943_120_896
STEP_SECONDS, _ = CHIPS["v5e"].roofline(FLOPS_PER_STEP, BYTES_PER_STEP)
IMAGES_PER_SECOND = round(CORE_BATCH / STEP_SECONDS)  # of a v5e core: 873

# Peak of a training process of the official size, batch 4 at 256×256: 2.2 GB on the CPU, 2.5 GB
# with XLA on the CPU (ru_maxrss); and something for the loader.
MEMORY = 3e9
# IRSTD-1k, decoded to a grey image and a mask: 1,001 × 512 × 512 × 2 bytes.
DECODED = 0.53e9


def doctor(
    require: str | None = None,
    cores: int = 1,
    dataset_dir: str | None = None,
    save_dir: str | None = None,
    compile_cache: str | None = None,
    timeout: float = 120.0,
    log: Callable[[str], None] = print,
) -> Report:
    """Check this machine for training the detector; see :func:`tpuscope.doctor.doctor`.

    Args:
        dataset_dir: data set to read and check.
        save_dir: folder of a run to check.
    """
    extra = checks(dataset_dir, save_dir)
    return general.doctor(require, cores, compile_cache, timeout, PACKAGES, extra, log)


def checks(
    dataset_dir: str | None, save_dir: str | None
) -> list[tuple[str, Callable[[Machine], list[Check]]]]:
    """Return the detector's own checks, by name."""
    return [
        ("training memory", training_memory),
        ("loader", loader),
        ("data set", lambda machine: data_set(dataset_dir)),
        ("data cache", data_cache),
        ("run folder", lambda machine: run_folder(machine, save_dir)),
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mshnet doctor``; ``args.command`` becomes :func:`run`."""
    command.add_flags(parser)
    parser.add_argument("--dataset-dir", metavar="DIR", help="data set to read and check")
    parser.add_argument(
        "--save-dir", metavar="DIR", help="folder of a run: can it be written, is there room"
    )
    parser.epilog = command.EPILOG.replace("tpuscope doctor", "mshnet doctor").replace(
        "--cores 8\n", "--cores 8 --dataset-dir DIR --save-dir runs/first\n"
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Do what the flags ask for; return the exit code.

    Raises:
        RequestError: a flag's value is wrong, or another flag is missing.
        Failed: the Cloud TPU service gave no answer.
    """
    return command.run(args, PACKAGES, checks(args.dataset_dir, args.save_dir))


def training_memory(machine: Machine) -> list[Check]:
    """Warn if the free memory does not hold a training process of the official size."""
    found = machine.memory()
    if found is None or found[1] >= MEMORY:
        return []
    detail = f"{found[1] / 1e9:.1f} GB free; training at the official size takes up to 3"
    return [warning("training memory", detail, "smaller: --batch-size, --crop-size, --cache disk")]


def loader(machine: Machine) -> list[Check]:
    """Measure how fast the CPU makes training samples; compare with what the TPU can take."""
    from .training.config import default_workers

    rate, workers = samples_per_second(), default_workers()
    processes = max(1, workers)  # without workers, the training process itself loads
    speed = f"{machine.cpus()} CPU cores make about {rate * processes:,.0f} samples/s"
    speed += f" ({processes} loader process{'es' * (processes > 1)} of {rate:,.0f})"
    cores = machine.tpu_cores()
    if not cores:
        return [ok("loader", speed)]
    need = cores * IMAGES_PER_SECOND
    speed += f"; {cores} TPU core{'s' * (cores > 1)} may take {need:,} "
    speed += f"(estimate for v5e, bf16, {CORE_BATCH} images a core)"
    if rate * processes >= need:
        return [ok("loader", speed)]
    if rate * (machine.cpus() - 1) >= need:
        return [warning("loader", speed, f"--workers {-int(-need // rate)}")]
    fix = "expect the TPU to wait for data; a machine with more CPU cores helps"
    return [warning("loader", speed, fix)]


def samples_per_second(seconds: float = 0.3) -> float:
    """Time augmented samples of 256×256 from one 512×512 grey image, in this process."""
    import numpy as np

    from .data.augment import augment

    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (512, 512), np.uint8)
    mask = (image > 250).astype(np.uint8)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        augment(image, mask, 256, 256, rng)
        count += 1
    return count / (time.perf_counter() - started)


def data_set(folder: str | None) -> list[Check]:
    """Check the data set as ``mshnet check-data`` does."""
    if folder is None:
        detail = "not given: training uses built-in scenes"
        return [ok("data set", detail, "--dataset-dir DIR checks yours (images/, masks/, lists)")]
    from .data.check import check
    from .data.stage import ARCHIVES

    path = Path(folder)
    archive = path.is_file() and path.name.lower().endswith(ARCHIVES)
    if path.exists() and (archive or is_remote(path)):
        kind = "an archive" if archive else "on a network drive, where reading each file is slow"
        fix = "train with --stage, which copies it to ./datasets, and check that folder"
        return [warning("data set", f"{path} is {kind}; its files were not checked", fix)]
    try:
        report = check(path)
    except RequestError as error:
        return [refused("data set", error)]
    errors = report.errors()
    counts = ", ".join(f"{split.images} {name}" for name, split in report.splits.items())
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return [problem("data set", f"{path}: {errors[0]}{more}", f"mshnet check-data {path}")]
    if report.shared_names or report.shared_content:
        detail = f"{path}: {counts} images; some are in train and in test"
        return [warning("data set", detail, f"mshnet check-data {path}")]
    return [ok("data set", f"{path}: {counts} images, every file reads")]


def data_cache(machine: Machine) -> list[Check]:
    """Warn if the disk has no room for the images that ``--cache disk`` decodes."""
    folder = cache_folder("mshnet")
    room = machine.free(folder)
    if room >= 2 * DECODED:
        return []
    detail = f"{room / 1e9:.1f} GB free in {existing(folder)}; --cache disk decodes images there "
    detail += f"(IRSTD-1k: {DECODED / 1e9:.2g} GB)"
    return [warning("data cache", detail, "set XDG_CACHE_HOME to another disk")]


def run_folder(machine: Machine, save_dir: str | None) -> list[Check]:
    """Check that a run can be written where it would be, and that there is room for it."""
    from .training.checkpoint import CHECKPOINT, PREVIOUS
    from .training.config import Config
    from .training.trainer import bytes_of_a_run

    path, config = Path(save_dir or "weight"), Config()
    fault = write_fault(path)
    if fault:
        fix = "choose another folder with --save-dir"
        return [problem("run folder", f"{path} {fault}", fix, TARGETS)]
    need, free = bytes_of_a_run(config.widths, config.depths), machine.free(path)
    detail = f"{path}: {free / 1e9:.1f} GB free; a run writes up to {need / 1e6:.0f} MB"
    if free < need:
        return [problem("run folder", detail, "free some space, or --save-dir on another disk")]
    if save_dir and any((path / name).exists() for name in (CHECKPOINT, PREVIOUS)):
        detail = f"{path} holds an earlier run, and a new one is refused there"
        return [warning("run folder", detail, f"continue it: --resume {path}")]
    return [ok("run folder", detail)]
