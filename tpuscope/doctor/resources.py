"""Memory, processors, shared memory and disks, against what a training needs."""

import time
from pathlib import Path

from .machine import Machine, existing
from .report import Check, ok, problem, warning

# The least time of a v5e core's training step, in bfloat16 at 256×256, is an estimate: benchmarks/
# scaling.py and GUIDE.md.
IMAGES_A_SECOND = 360  # of one core with 32 images
# Peak of a training process of the official size, batch 4 at 256×256: 2.2 GB on the CPU, 2.5 GB$
# with XLA on the CPU (ru_maxrss); and something for the loader.
MEMORY = 3e9
# IRSTD-1k, decoded to a grey image and a mask: 1,001 × 512 × 512 × 2 bytes.
DATA = 0.53e9


def memory(machine: Machine) -> Check:
    total, free = machine.memory()
    detail = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free >= MEMORY:
        return ok("memory", detail)
    fix = "end other programs; smaller: --batch-size, --crop-size, --cache disk"
    return warning("memory", f"{detail}; a training of the official size takes up to 3", fix)


def loader(machine: Machine) -> Check:
    """How fast the processors make training samples, measured; against what the TPU can take."""
    from mshnet.training.config import default_workers

    rate, workers = samples_a_second(), default_workers()
    processes = max(1, workers)  # without workers, the training process itself loads
    speed = f"{machine.cpus()} CPU cores make about {rate * processes:,.0f} samples/s"
    speed += f" ({processes} loader process{'es' * (processes > 1)} of {rate:,.0f})"
    cores = machine.tpu_cores()
    if not cores:
        return ok("loader", speed)
    need = cores * IMAGES_A_SECOND
    what = f"{cores} TPU core{'s' * (cores > 1)} may take {need:,} (v5e, batch 32 a core, estimate)"
    if rate * processes >= need:
        return ok("loader", f"{speed}; {what}")
    if rate * (machine.cpus() - 1) >= need:
        return warning("loader", f"{speed}; {what}", f"--workers {-int(-need // rate)}")
    fix = "expect the TPU to wait for data; a machine with more CPU cores helps"
    return warning("loader", f"{speed}; {what}", fix)


def samples_a_second(seconds: float = 0.3) -> float:
    """Augmented samples of 256×256 from one 512×512 grey image, in this process."""
    import numpy as np

    from mshnet.data.augment import augment

    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (512, 512), np.uint8)
    mask = (image > 250).astype(np.uint8)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        augment(image, mask, 256, 256, rng)
        count += 1
    return count / (time.perf_counter() - started)


def shared_memory(machine: Machine) -> list[Check]:
    """/dev/shm, through which loader processes hand over their batches."""
    from mshnet.training.config import default_workers

    folder, workers = machine.root / "dev/shm", default_workers()
    if not folder.is_dir() or not workers:
        return []
    free = machine.free(folder)
    # torch's DataLoader keeps two batches a process ready; a grey image and its mask are uint8.
    largest = int(free // (workers * 2 * 2 * 256 * 256))
    detail = f"/dev/shm has {free / 1e6:,.0f} MB free"
    if largest >= 256:
        return [ok("shared memory", detail)]
    detail += f": batches of up to {largest} images of 256×256 with {workers} loader processes"
    fix = "--workers 0, or in Docker: docker run --shm-size=2g"
    return [warning("shared memory", f"{detail} (a 'Bus error' is what more ends in)", fix)]


def disks(machine: Machine, save_dir: str | None) -> list[Check]:
    """Room for a run where it is written, and for a cache of decoded images."""
    from mshnet.training.config import Config
    from mshnet.training.trainer import bytes_of_a_run

    config = Config()
    need = bytes_of_a_run(config.widths, config.depths)
    place = existing(Path(save_dir or "weight"))
    free = machine.free(place)
    detail = f"{free / 1e9:.1f} GB free in {place}; a run writes up to {need / 1e6:.0f} MB"
    if free < need:
        fix = "free some space, or --save-dir on another disk"
        checks = [problem("disk", detail, fix)]
    else:
        checks = [ok("disk", detail)]
    cache = Path(machine.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    room = machine.free(cache)
    if room < 2 * DATA:
        text = f"{room / 1e9:.1f} GB free in {existing(cache)}; --cache disk decodes images there "
        text += f"(IRSTD-1k: {DATA / 1e9:.2g} GB)"
        checks.append(warning("data cache", text, "set XDG_CACHE_HOME to another disk"))
    return checks
