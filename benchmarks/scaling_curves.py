"""How cost grows: with the batch, the images, the targets, the data set, the loader's processes.

Each part measures points in processes of its own, fits a line where a line is meant, and draws one
figure. The network is narrow and the images are small where only the growth is of interest.
"""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import reference
import torch
from matplotlib.figure import Figure
from measure import alone, peak_memory, seconds
from official import official_step
from torch.optim import Adagrad
from torch.utils.data import DataLoader, Subset

from mshnet import MSHNet, SLSIoULoss, estimate
from mshnet.data.layout import DataFolder
from mshnet.data.loader import TrainingSet, training_loader
from mshnet.data.sample_cache import CACHES, SampleCache
from mshnet.data.scenes import write_scenes
from mshnet.metrics import DetectionMetrics
from mshnet.training import backend as backends
from mshnet.training.backend import Backend
from mshnet.training.malloc import keep_freed_memory
from mshnet.training.step import Normalize, train_step

NARROW = {"widths": (4, 8, 8, 16, 16), "depths": (1, 1, 1, 1, 1)}
COLOURS = {"official": "#ff9f0a", "ours": "#0a84ff"}
BATCHES = (1, 2, 4, 8, 16, 32)


def draw(settings: cases.Settings, folder: Path, log: Callable[[str], None]) -> Iterator[Path]:
    """Measure every part, draw it, say what it found; the figures' paths, and the points' last."""
    folder.mkdir(parents=True, exist_ok=True)
    points = {}
    for part in (steps, epochs, targets, memory, data_set, feeding):
        start = time.perf_counter()
        points[part.__name__], figure, words = part(settings)
        path = folder / f"{part.__name__}.png"
        figure.savefig(path, dpi=110)
        for text in words:
            log(f"{part.__name__}: {text}")
        log(f"{part.__name__} took {time.perf_counter() - start:.0f} s")
        yield path
    path = folder / "scaling_curves.json"
    path.write_text(json.dumps(points, indent=1))
    yield path


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and value at 0 of the line through the points."""
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(start)


def _panels(count: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.6 * count, 3.4), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _curves(axis: Any, x: Sequence[float], values: dict[str, Sequence[float]], **labels) -> None:
    for name, y in values.items():
        axis.plot(x, y, "o-", color=COLOURS.get(name), label=name)
    axis.set(**labels)
    axis.legend()


# --- the parts -----------------------------------------------------------------------------------


def steps(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """Running and tracing a step on XLA, against the batch."""
    found = {
        batch: alone(
            _step_point,
            replace(settings, batch_size=batch, size=64, **NARROW),
            XLA_FLAGS="--xla_backend_optimization_level=0",
        )
        for batch in BATCHES
    }
    figure, axes = _panels(2)
    words = []
    for axis, kind in zip(axes, ("run", "trace"), strict=True):
        curves = {name: [found[b][kind][name] for b in BATCHES] for name in COLOURS}
        title = {"run": "a step, s", "trace": "tracing it, s"}[kind]
        _curves(axis, BATCHES, curves, xlabel="images in a batch", title=title, yscale="log")
        axis.set_xscale("log", base=2)
        axis.set_xticks(BATCHES, map(str, BATCHES))
        for name, y in curves.items():
            slope, start = _line(BATCHES, y)
            words.append(f"{kind}, {name}: {start:.3f} s + {1000 * slope:.2f} ms an image")
    return found, figure, words


def _step_point(settings: cases.Settings) -> dict[str, dict[str, float]]:
    os.environ["PJRT_DEVICE"] = "CPU"
    step = cases.Step(settings, backends.make_backend("tpu"))
    step.official(), step.ours(), step.ours()  # twice: it is repeated from now on
    step.traced = cases.Clock()
    clock = cases.Clock().take_turns(step.official, step.ours, 3)
    return {
        kind: {name: float(np.median(getattr(taken, name))) for name in COLOURS}
        for kind, taken in (("run", clock), ("trace", step.traced))
    }


def epochs(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """An epoch of eager PyTorch on the CPU, loader and steps, against the images."""
    counts = (48, 96, 192, 384)
    settings = replace(settings, size=64, **NARROW)
    curves = {
        name: [alone(_epoch_point, settings, name, count) for count in counts] for name in COLOURS
    }
    figure, (axis,) = _panels(1)
    _curves(
        axis,
        counts,
        curves,
        xlabel="training images",
        title="an epoch on the CPU, s",
        ylim=(0, None),
    )
    words = []
    for name, y in curves.items():
        slope, start = _line(counts, y)
        words.append(f"{name}: {start:.2f} s + {1000 * slope:.1f} ms an image")
    return dict(zip(counts, zip(*curves.values(), strict=True), strict=True)), figure, words


def _epoch_point(settings: cases.Settings, name: str, count: int) -> float:
    size, batch = settings.size, settings.batch_size
    samples = DataFolder(settings.folder).samples("train")
    network = settings.widths, settings.depths
    torch.manual_seed(0)
    random.seed(0)
    if name == "official":
        way = reference.choose(settings.checkout)
        whole = way.samples(settings.folder, "train", size, size)
        chosen = Subset(whole, [i % len(samples) for i in range(count)])
        loader = DataLoader(chosen, batch, shuffle=True, drop_last=True)
        model = reference.choose(None).network(*network)
        optimizer = Adagrad(model.parameters(), lr=cases.RATE)

        def work() -> None:
            for images, masks in loader:
                official_step(model, optimizer, images, masks, cases.WARM_EPOCH, cases.EPOCH)
    else:
        store = SampleCache([samples[i % len(samples)] for i in range(count)], title="read")
        loader = training_loader(TrainingSet(store, size, size, 0), batch, 0)
        backend = backends.make_backend("cpu")
        keep_freed_memory()  # as the command line does
        model, normalize, criterion = MSHNet(3, *network), Normalize(), SLSIoULoss()
        optimizer = backend.prepare(model, lambda m: Adagrad(m.parameters(), lr=cases.RATE), None)

        def work() -> None:
            for batch in backend.device_batches(loader):
                train_step(
                    model, normalize, criterion, optimizer, backend, *batch, cases.WARM_EPOCH,
                    cases.EPOCH,
                )  # fmt: skip

    work()
    return min(seconds(work), seconds(work))


def targets(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """The metrics of one image, against its targets."""
    numbers = (1, 4, 16, 36, 64)
    found = alone(_metrics_points, settings, numbers)
    curves = {name: [1000 * point[name] for point in found] for name in COLOURS}
    figure, (axis,) = _panels(1)
    _curves(axis, numbers, curves, xlabel="targets in an image", yscale="log",
            title="its metrics, ms")  # fmt: skip
    words = []
    for name, y in curves.items():
        slope, start = _line(numbers, y)
        words.append(f"{name}: {start:.1f} ms + {slope:.2f} ms a target")
    return dict(zip(numbers, zip(*curves.values(), strict=True), strict=True)), figure, words


def _metrics_points(settings: cases.Settings, numbers: Sequence[int]) -> list[dict[str, float]]:
    return [_metrics_point(settings, number) for number in numbers]


def _metrics_point(settings: cases.Settings, number: int) -> dict[str, float]:
    side, size = int(number**0.5), 256
    mask = torch.zeros(1, 1, size, size)
    for place in range(number):
        y, x = (12 + 28 * (place // side), 12 + 28 * (place % side))
        mask[..., y : y + 4, x : x + 4] = 1
    logits = 12 * mask - 6 + torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    official, ours = reference.choose(settings.checkout).metrics(size), DetectionMetrics(size)
    clock = cases.Clock().take_turns(
        lambda: official.update(logits, mask), lambda: ours.update(logits, mask), 5
    )
    return {name: float(np.median(getattr(clock, name))) for name in COLOURS}


def memory(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """Most memory of a training on the CPU, against the batch."""
    curves = {
        name: [alone(_memory_point, replace(settings, size=128, batch_size=b), name) / 1e9
               for b in BATCHES[1:]]
        for name in COLOURS
    }  # fmt: skip
    figure, (axis,) = _panels(1)
    _curves(axis, BATCHES[1:], curves, xlabel="images in a batch, 128×128",
            title="most memory of the process, GB", ylim=(0, None))  # fmt: skip
    words = []
    for name, y in curves.items():
        slope, start = _line(BATCHES[1:], y)
        words.append(f"{name}: {start:.2f} GB + {1000 * slope:.0f} MB an image of 128×128")
    return dict(zip(BATCHES[1:], zip(*curves.values(), strict=True), strict=True)), figure, words


def _memory_point(settings: cases.Settings, name: str) -> float:
    plain = Backend(torch.device("cpu"), "cpu")
    if name == "ours":
        keep_freed_memory()  # as the command line does
    step = cases.Step(settings, backends.make_backend("cpu") if name == "ours" else plain)
    for _ in range(3):
        getattr(step, name)()
    return peak_memory()


def data_set(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """Memory and time of opening 10,000 images, by what keeps them."""
    count, found = 10_000, {}
    with tempfile.TemporaryDirectory() as name:
        folder = _many(Path(name) / "data", count)
        for cache in CACHES:
            found[cache] = alone(_cache_point, str(folder), cache, XDG_CACHE_HOME=name)
    figure, axes = _panels(2)
    for axis, key, title in zip(
        axes, ("held", "rate"), ("memory taken, GB", "samples/s of one process"), strict=True
    ):
        axis.bar(list(found), [point[key] for point in found.values()], color=COLOURS["ours"])
        axis.set(title=title, xlabel="--cache")
    figure.suptitle(f"{count:,} images of 256×256")
    words = [
        f"--cache {cache}: {p['held']:.2f} GB more than before, opened in {p['opened']:.0f} s, then"
        f" {p['rate']:.0f} samples/s"
        for cache, p in found.items()
    ]
    return found, figure, words


def _many(folder: Path, count: int) -> Path:
    """A data set of so many names, links to a few scenes."""
    drawn = write_scenes(folder.with_name("drawn"), train=50, test=1, size=256, progress=False)
    samples = DataFolder(drawn).samples("train")
    names = [f"{i:05}" for i in range(count)]
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
        for i, name in enumerate(names):
            source = getattr(samples[i % len(samples)], kind[:-1])
            (folder / kind / f"{name}{source.suffix}").symlink_to(source.resolve())
    for list_name in ("trainval.txt", "test.txt"):
        (folder / list_name).write_text("\n".join(names))
    return folder


def _cache_point(folder: str, cache: str) -> dict[str, float]:
    samples = DataFolder(folder).samples("train")
    before, start = peak_memory(), time.perf_counter()
    store = SampleCache(samples, cache=cache, title="read")
    opened = time.perf_counter() - start
    data = TrainingSet(store, 256, 256, 0)
    order = np.random.default_rng(0).permutation(len(data))[:1000]
    took = seconds(lambda: [data[0, int(i)] for i in order])
    held = (peak_memory() - before) / 1e9
    return {"held": held, "opened": opened, "rate": len(order) / took}


def feeding(settings: cases.Settings) -> tuple[dict, Figure, list[str]]:
    """Samples a second that reach the device, against the loader's processes."""
    workers, cores = (0, 1, 2, 4), (1, 8)
    curves = {
        f"to {n} virtual core{'s' * (n > 1)}": [
            alone(_feed_point, settings, n, w, PJRT_DEVICE="CPU") for w in workers
        ]
        for n in cores
    }
    eaten = {
        topology: 1 / _least_seconds(topology, batch, settings.size) * batch
        for topology, batch in (("v5e:1x1", 32), ("v5e:2x4", 256))
    }
    figure, (axis,) = _panels(1)
    _curves(axis, workers, curves, xlabel=f"loader processes, {os.cpu_count()} cores here",
            title="samples/s")  # fmt: skip
    for topology, rate in eaten.items():
        axis.axhline(rate, linestyle=":", color="#444")
        axis.annotate(f"{topology} eats at most {rate:,.0f}/s", (0, 1.05 * rate))
    best = max(max(y) for y in curves.values())
    axis.set(yscale="log", xticks=workers, ylim=(200, 2 * max(best, *eaten.values())))
    axis.legend(loc="lower right")
    one = curves["to 1 virtual core"][0]
    words = [f"{name}: {[round(v) for v in y]} samples/s with {workers} processes"
             for name, y in curves.items()]  # fmt: skip
    for topology, rate in eaten.items():
        words.append(
            f"{topology} eats at most {rate:,.0f} samples/s by the roofline (bf16, 32 a core): "
            f"{rate / one:.1f} times what one process gives here, {rate / best:.1f} times the "
            "most of this machine"
        )
    return {"fed": curves, "eaten": eaten}, figure, words


def _feed_point(settings: cases.Settings, cores: int, workers: int) -> float:
    backend = backends.make_backend("tpu", cores)
    samples = DataFolder(settings.folder).samples("train")
    store = SampleCache([samples[i % len(samples)] for i in range(1024)], title="read")
    loader = training_loader(TrainingSet(store, settings.size, settings.size, 0), 32, workers)

    def work() -> None:
        for images, masks in backend.device_batches(loader):
            # The least that makes the device take them.
            total = images.sum(dtype=torch.int32) + masks.sum(dtype=torch.int32)
            backend.sync()
        total.item()

    work()
    return 1024 / min(seconds(work), seconds(work))


def _least_seconds(topology: str, batch: int, size: int) -> float:
    """Of a step on a TPU, by its compiler."""
    given = {"batch_size": batch, "base_size": size, "precision": "bf16"}
    return estimate.compile_step(estimate.request(given, "train", topology)).roofline_seconds
