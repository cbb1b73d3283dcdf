"""The rows of ``mshnet bench``: each does one kind of work the official way and ours.

A row's function runs in a process of its own, because XLA's devices and an allocator's peak are
settled once for each. It checks that both ways give the same numbers before it believes a clock.
"""

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import reference
import torch
from measure import Apart, Clock, Row, alone, close, peak_memory, seconds
from official import official_update
from torch import Tensor, nn
from torch.optim import Adagrad, Adam
from torch.utils.data import DataLoader, Subset

from mshnet import MSHNet, SLSIoULoss, estimate
from mshnet.data.bitmask import pack, unpack
from mshnet.data.layout import DataFolder
from mshnet.data.loader import EvaluationSet, TrainingSet, evaluation_loader, training_loader
from mshnet.data.sample_cache import SampleCache
from mshnet.data.scenes import write_scenes
from mshnet.interpolate import by_matrices
from mshnet.loss import multiscale_loss
from mshnet.metrics import DetectionMetrics
from mshnet.training import backend as backends
from mshnet.training.backend import Backend
from mshnet.training.config import Config
from mshnet.training.evaluation import compiled_evaluation, evaluate, predict_batches
from mshnet.training.malloc import keep_freed_memory
from mshnet.training.step import Normalize, summed_step, train_step
from mshnet.training.trainer import Trainer
from tpuscope import aot
from tpuscope.engine import metrics
from tpuscope.engine import torch_xla as runtime

RATE, WARM_EPOCH, EPOCH = 0.05, 0, 1  # the full phase: all heads, the whole loss
WARMUP_STEPS = 80  # steps before an evaluation


@dataclass(frozen=True)
class Settings:
    """What is compared, and on what.

    Attributes:
        folder: of the data set.
        size: side of the images, pixels.
        batch_size: images a step.
        rounds: how often each way takes its turn.
        epoch_size: side of the images in the row ``epoch``, which is the longest.
        images: at most so many in a round of ``loader`` and ``evaluation``.
        checkout: a folder with the official code, or None for benchmarks/official.py.
        widths: of the network.
        depths: of the network.
    """

    folder: str
    size: int = 256
    batch_size: int = 8
    rounds: int = 3
    epoch_size: int = 64
    images: int = 200
    checkout: str | None = None
    widths: tuple[int, ...] = (16, 32, 64, 128, 256)
    depths: tuple[int, ...] = (1, 2, 2, 2, 2)

    @property
    def about_step(self) -> str:
        """For titles."""
        return f"batch {self.batch_size}, {self.size}×{self.size}"


class Step:
    """The same training step, both ways, on one device, from the same weights.

    Args:
        backend: of ours; the official way has float32 only.
    """

    def __init__(self, settings: Settings, backend: Backend):
        self.backend = backend
        self.way = reference.choose(settings.checkout)
        torch.manual_seed(0)
        network = settings.widths, settings.depths
        self.theirs, self.model = self.way.network(*network), MSHNet(3, *network)
        self.model.load_state_dict(self.theirs.state_dict())
        self.theirs.to(self.backend.device)
        self.their_optimizer = Adagrad(self.theirs.parameters(), lr=RATE)
        self.optimizer = self.backend.prepare(
            self.model, lambda model: Adagrad(model.parameters(), lr=RATE), None
        )
        self.normalize, self.criterion = Normalize(), SLSIoULoss()
        self.backend.move(self.normalize)
        images, masks = batch_of(settings)
        self.images, self.masks = (
            self.backend.to_device(images),
            self.backend.to_device(pack(masks)),
        )
        # Normalised on the host, as the official loader does.
        self.their_images = self.backend.to_device(Normalize()(images))
        self.their_masks = self.backend.to_device(masks.float())
        self.total = self.backend.to_device(torch.zeros(1))
        parts = self.model, self.normalize, self.criterion, self.optimizer, self.backend
        self.trace_ours, state = summed_step(*parts, WARM_EPOCH, EPOCH)
        self.step = self.backend.compile_step(self.trace_ours, state)
        self.backend.sync()  # what setting up has left to do is no part of a step
        self.losses: dict[str, list[float]] = {"official": [], "ours": []}
        self.traced = Clock()

    def official(self) -> None:
        """One step, waited for."""
        start = time.perf_counter()
        loss = official_update(
            self.theirs,
            self.their_optimizer,
            self.their_images,
            self.their_masks,
            WARM_EPOCH,
            EPOCH,
            self.way.criterion,
        )
        self.traced.official.append(time.perf_counter() - start)
        self.losses["official"].append(loss.item())
        self.backend.sync()
        _wait(self.backend)

    def ours(self) -> None:
        """One step, waited for."""
        start = time.perf_counter()
        [loss] = self.step(self.images, self.masks, self.total)
        self.traced.ours.append(time.perf_counter() - start)
        self.losses["ours"].append(loss.item())
        _wait(self.backend)

    def report(self) -> dict[str, Any]:
        """What there is to compare, and the process's memory."""
        return {"losses": self.losses, "peak": peak_memory(), "label": self.backend.label}


def _same_losses(official: dict, ours: dict, share: float = 1e-4) -> str:
    """Compare the first losses of two ways."""
    official, ours = official["official"][0], ours["ours"][0]
    close(ours, official, share, "loss of the first step")
    return f"loss of the first step {official:.6f}, {ours:.6f}"


def batch_of(settings: Settings) -> tuple[Tensor, Tensor]:
    """Images and masks of a batch, uint8 (B, 1, S, S): whole images, so each has a target."""
    samples = DataFolder(settings.folder).samples("train")
    samples = [samples[i % len(samples)] for i in range(settings.batch_size)]
    whole = EvaluationSet(SampleCache(samples, title="read a batch"), settings.size)
    images, masks = zip(*(whole[i] for i in range(len(whole))), strict=True)
    return torch.stack(images), torch.stack(masks)


def _wait(backend: Backend) -> None:
    """Until the device has nothing left to do."""
    if backend.device.type == "xla":
        runtime.wait()
    elif backend.device.type == "cuda":
        torch.cuda.synchronize()


def _use_xla_on_cpu() -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    runtime.device()  # before the first backward pass of the process


def xla_step(settings: Settings) -> list[Row]:
    """A training step on XLA: run, trace, compile."""
    _use_xla_on_cpu()
    step = Step(settings, backends.make_backend("tpu"))
    compiling, counted = Clock(), {}
    for name in ("official", "ours"):
        before, counts_before = metrics.now(), runtime.counters()
        getattr(step, name)()
        compiled = metrics.now() - before
        getattr(compiling, name).append(compiled.compile_seconds)
        counted[name] = runtime.counters() - counts_before
    checked = _same_losses(step.losses, step.losses)
    step.ours()  # is traced once more, before it is repeated
    step.traced = Clock()
    running = Clock().take_turns(step.official, step.ours, settings.rounds)
    traced = Clock().take_turns(
        lambda: _trace_official_without_fallbacks(step), lambda: _trace_ours(step), settings.rounds
    )
    fallbacks = f"{counted['official'].fallbacks} host fallbacks a step, ours none"
    compilations = ", ".join(f"{name} {found.compilations}" for name, found in counted.items())
    about = settings.about_step
    return [
        Row("xla_step", f"training step on XLA, {about}", "s", running.official, running.ours,
            4, checked, fallbacks),
        Row("trace", "the host's part of that step, until it is handed over", "s",
            step.traced.official, step.traced.ours, 50, checked,
            f"the official way waits for its {fallbacks.split(',')[0]}; ours is traced twice "
            "and then repeated (tpuscope/engine/compiled_step.py)"),
        Row("trace_alone", "tracing it anew: the official way without its fallbacks", "s",
            traced.official, traced.ours, None, "", "upsampling by matrices in both"),
        Row("compile", "compiling that step", "s", compiling.official, compiling.ours, 4,
            checked, f"programs: {compilations}; one sample of each in a process"),
    ]  # fmt: skip


def _trace_ours(step: Step) -> None:
    step.trace_ours(step.images, step.masks, step.total)
    _forget(step)


def _trace_official_without_fallbacks(step: Step) -> None:
    upsample_by_matrices(step.theirs)
    official_update(
        step.theirs, step.their_optimizer, step.their_images, step.their_masks, WARM_EPOCH, EPOCH,
        step.way.criterion,
    )  # fmt: skip
    _forget(step)


def _forget(step: Step) -> None:
    """Drop what was traced: nothing of it has to run."""
    import torch_xla

    torch_xla._XLAC._clear_pending_irs(str(step.backend.device))


class ByMatrices(nn.Module):
    """Upsampling that XLA can differentiate off TPU, in place of the official module."""

    def __init__(self, scale: int):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return by_matrices(x, self.scale)


class Largest(nn.Module):
    """``nn.AdaptiveMaxPool2d(1)`` that the TPU's compiler takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3), keepdim=True)


def upsample_by_matrices(network: nn.Module) -> None:
    """Replace the official way's modules for upsampling."""
    _replace(network, nn.Upsample, lambda module: ByMatrices(int(module.scale_factor)))


def _replace(network: nn.Module, kind: type, by: Callable[[nn.Module], nn.Module]) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, by(child))


def cpu_step(settings: Settings) -> list[Row]:
    """A training step of eager PyTorch on the CPU."""
    return _eager_step(settings, "cpu", "cpu_step", 1.5)


def cuda_step(settings: Settings, device: str = "cuda") -> list[Row]:
    """A training step on a GPU: float32, bfloat16, bfloat16 compiled by ``torch.compile``."""
    rows = _eager_step(settings, device, "cuda_step", None)
    rows += _eager_step(settings, device, "cuda_step_bf16", None, "bf16")
    return rows + _eager_step(settings, device, "cuda_step_compiled", None, "bf16", compiled=True)


def _eager_step(
    settings: Settings,
    device: str,
    key: str,
    goal: float | None,
    precision: str = "fp32",
    compiled: bool = False,
) -> list[Row]:
    make = partial(_make_step, settings, device, precision, compiled)
    with Apart(make) as both:
        clock = both.take_turns(max(5, settings.rounds))
        official, ours = both.report("official"), both.report("ours")
    checked = _same_losses(official["losses"], ours["losses"], 1e-4 if precision == "fp32" else 0.1)
    if precision == "fp32":
        # In a process of its own, or its memory would count as ours.
        checked += "; " + alone(_same_gradients, settings, device)
    title = f"training step, eager, {ours['label']}, {settings.about_step}"
    note = "" if precision == "fp32" else f"ours {precision}{', compiled' * compiled}"
    peaks = [official["peak"]], [ours["peak"]]
    return [
        Row(key, title, "s", clock.official, clock.ours, goal, checked, note),
        Row(f"{key}_memory", "of it, most memory of the process", "bytes", *peaks),
    ]


def _make_step(settings: Settings, device: str, precision: str, compiled: bool, name: str) -> Step:
    plain = Backend(torch.device(device), device)
    ours = name == "ours"
    if ours and device == "cpu":
        keep_freed_memory()  # as the command line does
    step = Step(settings, backends.make_backend(device, precision=precision) if ours else plain)
    if ours and compiled:
        step.model.compile()  # in place: the step has it already
    return step


def _same_gradients(settings: Settings, device: str) -> str:
    """Compare all gradients of one step, with the official loss in both."""
    step = Step(settings, backends.make_backend(device))
    scales, fused = step.theirs(step.their_images, True)
    target = step.their_masks
    losses = [step.way.criterion(fused, target, WARM_EPOCH, EPOCH)]
    for i, logits in enumerate(scales):
        target = nn.functional.max_pool2d(target, 2) if i else target
        losses.append(step.way.criterion(logits, target, WARM_EPOCH, EPOCH))
    (sum(losses) / len(losses)).backward()
    scales, fused = step.model(step.normalize(step.images), True)
    target = unpack(step.masks).float()
    official = SLSIoULoss(official=True)
    multiscale_loss(official, scales, fused, target, WARM_EPOCH, EPOCH).backward()
    largest = 0.0
    pairs = zip(step.theirs.parameters(), step.model.parameters(), strict=True)
    total = sum(p.grad.square().sum() for p in step.theirs.parameters()).sqrt()
    for theirs, mine in pairs:
        largest = max(largest, float((theirs.grad - mine.grad).norm() / total))
        theirs.grad = mine.grad = None
    if largest > 5e-3:
        raise RuntimeError(f"gradients differ by {largest:.1e} of their length")
    return f"gradients within {largest:.0e} of their length"


def loader(settings: Settings) -> list[Row]:
    """Training samples a second of one process, and the bytes that they bring to the device."""
    torch.set_num_threads(1)  # as in a loader's process
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(folder, train=48, test=1, size=512, progress=False)
        rows = [
            _loader_row(settings, settings.folder, "loader", Path(settings.folder).name),
            _loader_row(settings, folder, "loader_512", "scenes of 512×512"),
        ]
    return [*rows, _feed_bytes(settings)]


def _loader_row(settings: Settings, folder: str, key: str, name: str) -> Row:
    official, ours, checked = _loaders(settings, folder)
    count = len(official.dataset) // settings.batch_size * settings.batch_size

    def through(loader: DataLoader) -> Callable[[], None]:
        def work() -> None:
            for _ in loader:
                pass

        return work

    clock = Clock().take_turns(through(official), through(ours), max(5, settings.rounds))
    rates = ([count / s for s in values] for values in (clock.official, clock.ours))
    title = f"training samples of one process, {name}, crops of {settings.size}×{settings.size}"
    return Row(key, title, "samples/s", *rates, 3, checked, "decoded images in memory: --cache ram")


def _loaders(settings: Settings, folder: str) -> tuple[DataLoader, DataLoader, str]:
    """The official way's and ours, over the same samples, and what is equal."""
    way, size = reference.choose(settings.checkout), settings.size
    samples = DataFolder(folder).samples("train")[: settings.images]
    random.seed(0)
    theirs = Subset(way.samples(folder, "train", size, size), range(len(samples)))
    official = DataLoader(theirs, settings.batch_size, shuffle=True, drop_last=True)
    store = SampleCache(samples, title="read images")
    ours = training_loader(TrainingSet(store, size, size, 0), settings.batch_size, 0)
    return official, ours, _same_samples(settings, folder, way)


def _same_samples(settings: Settings, folder: str, way: reference.OfficialWay) -> str:
    """Compare what is tested, where nothing is random."""
    theirs = way.samples(folder, "test", settings.size, settings.size)
    store = SampleCache(DataFolder(folder).samples("test")[:8], channels=3, title="read images")
    whole, largest = EvaluationSet(store, settings.size), 0.0
    for i in range(len(store)):
        (image, mask), (expected, target) = whole[i], theirs[i]
        largest = max(largest, float((Normalize()(image[None])[0] - expected).abs().max()))
        if not torch.equal(mask != 0, target > 0.5):
            raise RuntimeError(f"the mask of {store.samples[i].name} is not the official way's")
    if largest > 1e-5:
        raise RuntimeError(f"resized images differ by {largest}")
    return f"{len(store)} resized test samples within {largest:.0e}"


def _feed_bytes(settings: Settings) -> Row:
    official, ours, checked = _loaders(settings, settings.folder)
    sizes = (
        [sum(t.nbytes for t in next(iter(loader))) / settings.batch_size]
        for loader in (official, ours)
    )
    return Row("feed_bytes", "bytes of a sample to the device", "bytes", *sizes, 12, checked,
               "float32 RGB and mask against 8-bit grey and a mask of bits")  # fmt: skip


class Evaluation:
    """A test split, both ways, with weights whose maps look like detections."""

    def __init__(self, settings: Settings, backend: Backend, images: int):
        self.backend = backend
        self.way = reference.choose(settings.checkout)
        self.size = settings.size
        samples = DataFolder(settings.folder).samples("test")[:images]
        theirs = self.way.samples(settings.folder, "test", self.size, self.size)
        self.their_loader = DataLoader(Subset(theirs, range(len(samples))), 1)
        # In colour, as the official way reads it: the numbers are to be the same.
        whole = EvaluationSet(SampleCache(samples, channels=3, title="read images"), self.size)
        self.loader = evaluation_loader(whole, settings.batch_size, 0)
        torch.manual_seed(0)
        network = settings.widths, settings.depths
        self.theirs = self.way.network(*network).eval()
        self.model = MSHNet(3, *network)
        _teach(self.model, settings)
        _find_few(self.model, torch.stack([whole[i][0] for i in range(0, len(samples), 4)]))
        self.theirs.load_state_dict(self.model.state_dict())
        self.theirs.to(self.backend.device)
        self.normalize = Normalize()
        for module in (self.model, self.normalize):
            self.backend.move(module)
        # As the trainer: traced once for all epochs.
        self.step = compiled_evaluation(self.model, self.normalize, self.backend)
        self.numbers: dict[str, dict] = {}
        self.images = len(samples)

    @torch.no_grad()
    def official(self) -> None:
        """Image by image, all metrics of each."""
        metrics = self.way.metrics(self.size)
        for images, masks in self.their_loader:
            images, masks = images.to(self.backend.device), masks.to(self.backend.device)
            _, fused = self.theirs(images, True)
            self.backend.sync()
            metrics.update(fused, masks)
        self.numbers["official"] = metrics.numbers()

    def ours(self) -> None:
        """Batch by batch, in both definitions."""
        parts = self.model, self.normalize, self.backend, self.loader
        metrics = evaluate(*parts, step=self.step)
        found = metrics.compute("official")
        self.numbers["ours"] = {**found, **found.pop("roc")}

    def report(self) -> dict[str, Any]:
        """Numbers of both ways, as far as they ran here."""
        about = {"images": self.images, "label": self.backend.label, "numbers": self.numbers}
        if "ours" in self.numbers:  # in the other process our network would be compiled for nothing
            about["network"] = seconds(self._network)
        return about

    @torch.no_grad()
    def _network(self) -> None:
        """Ours without metrics."""
        for _ in predict_batches(self.step, self.backend, self.loader, True):
            pass


def _teach(model: MSHNet, settings: Settings) -> None:
    """A few steps of the finest head on the CPU, small, so that there is something to evaluate."""
    samples = DataFolder(settings.folder).samples("train")[: settings.images]
    store = SampleCache(samples, channels=3, title="read images")
    loader = training_loader(TrainingSet(store, 64, 64, 0), settings.batch_size, 0)
    backend = Backend(torch.device("cpu"), "cpu")
    optimizer = Adam(model.parameters(), lr=1e-3)  # in so few steps further than Adagrad
    model.train()
    batches = (batch for _ in itertools.count() for batch in loader)
    for images, masks in itertools.islice(batches, WARMUP_STEPS):
        parts = model, Normalize(), SLSIoULoss(), optimizer, backend
        train_step(*parts, images, masks, warm_epoch=1, epoch=0)
    model.eval()


@torch.no_grad()
def _find_few(model: MSHNet, images: Tensor) -> None:
    """Let the fused head hand the finest one through, and find one pixel in a thousand."""
    model.final.weight.zero_()
    model.final.weight[0, 0, 1, 1] = 1
    logits = model(Normalize()(images), True)[1]
    model.final.bias -= torch.quantile(logits, 0.999)


def evaluation(settings: Settings) -> list[Row]:
    """A test split on XLA."""
    # Of the official way's minute each for compiling and for 24 images, a few would say the same.
    return [_evaluation_row(settings, "tpu", "evaluation", min(settings.images, 24))]


def evaluation_cpu(settings: Settings) -> list[Row]:
    """A test split on the CPU, with the network and without."""
    row = _evaluation_row(settings, "cpu", "evaluation_cpu", settings.images)
    return [row, _metrics_row(settings)]


def _evaluation_row(settings: Settings, device: str, key: str, images: int) -> Row:
    with Apart(partial(_make_evaluation, settings, device, images)) as both:
        clock = both.take_turns(settings.rounds)
        official, ours = both.report("official"), both.report("ours")
    checked = _same_numbers(official["numbers"]["official"], ours["numbers"]["ours"])
    title = f"evaluation of {ours['images']} images, network and metrics, {ours['label']}"
    most = statistics.median(clock.official) / ours["network"]
    note = (
        f"{ours['network']:.2f} s of ours are reading and the network: with metrics that cost "
        f"nothing it would be {most:.2f}×"
    )
    return Row(key, title, "s", clock.official, clock.ours, 10, checked, note)


def _make_evaluation(settings: Settings, device: str, images: int, name: str) -> Evaluation:
    if device == "tpu":
        _use_xla_on_cpu()
    plain = device == "cpu" and name == "official"
    if device == "cpu" and not plain:
        keep_freed_memory()  # as the command line does
    backend = Backend(torch.device("cpu"), "cpu") if plain else backends.make_backend(device)
    return Evaluation(settings, backend, images)


def _same_numbers(official: dict, ours: dict) -> str:
    """Compare all numbers of two evaluations."""
    for name in ("iou", "pixel_accuracy", "pd", "fa"):
        close(ours[name], official[name], 1e-3, name)
    for name in ("tpr", "fpr"):
        # Not of the first threshold, sigmoid > 0: it asks where float32 ends, and XLA ends earlier.
        for mine, theirs in list(zip(ours[name], official[name], strict=True))[1:]:
            close(mine, theirs, 1e-3, name)
    return (
        f"IoU {official['iou']:.6f}, {ours['iou']:.6f}, "
        f"Fa {1e6 * official['fa']:.2f}e-6, {1e6 * ours['fa']:.2f}e-6"
    )


def _metrics_row(settings: Settings) -> Row:
    """The metrics alone, on the host, of maps with a few regions."""
    way = reference.choose(settings.checkout)
    samples = way.samples(settings.folder, "test", settings.size, settings.size)
    torch.manual_seed(0)
    masks = torch.stack([samples[i][1] for i in range(min(8, len(samples)))])
    logits = 10 * (masks - 0.5) + 2.5 * torch.randn_like(masks)
    official, ours = way.metrics(settings.size), DetectionMetrics(settings.size)

    def theirs() -> None:
        for i in range(len(masks)):
            official.update(logits[i : i + 1], masks[i : i + 1])

    clock = Clock().take_turns(theirs, lambda: ours.update(logits, masks), max(5, settings.rounds))
    found = ours.compute("official")
    checked = _same_numbers(official.numbers(), found | found["roc"])
    title = f"of it the metrics, {len(masks)} images"
    return Row("metrics", title, "s", clock.official, clock.ours, None, checked)


def tpu_bytes(settings: Settings) -> list[Row]:
    """Bytes that a step moves for each image, by the TPU's compiler."""
    _use_xla_on_cpu()
    given = {"batch_size": settings.batch_size, "base_size": settings.size}
    network = {"widths": settings.widths, "depths": settings.depths}
    ours = estimate.compile_step(estimate.request(given | network, "train", "v5e:1x1"))
    step = Step(settings, backends.make_backend("tpu"))
    upsample_by_matrices(step.theirs)
    _replace(step.theirs, nn.AdaptiveMaxPool2d, lambda module: Largest())

    def official(images: Tensor, masks: Tensor) -> Tensor:
        return official_update(
            step.theirs, step.their_optimizer, images, masks, WARM_EPOCH, EPOCH, step.way.criterion
        )

    theirs = aot.compile(official, [step.their_images, step.their_masks], "v5e:1x1")
    moved = ([r.bytes_accessed / settings.batch_size] for r in (theirs, ours))
    return [
        Row(
            "tpu_bytes",
            f"bytes a step moves for each image, v5e, {settings.about_step}, fp32",
            "bytes",
            *moved,
            3,
            "",
            "by the TPU's compiler, no TPU ran; the official way upsampling by matrices, because "
            "its own way cannot be traced off TPU, and with amax for AdaptiveMaxPool2d, whose "
            "gradient the compiler refuses for maps of 256×256",
        )
    ]


def epoch(settings: Settings, run: Callable = alone) -> list[Row]:
    """An epoch and its evaluation on XLA, from files to numbers; each in a process of its own."""
    small = Settings(**vars(settings) | {"size": settings.epoch_size})
    official, ours = run(_official_epoch, small), run(_our_epoch, small)
    title = f"an epoch of {Path(settings.folder).name} and its test, {small.about_step}, XLA"
    parts = ", ".join(
        f"{name} {x['compiling']:.0f} s" for name, x in (("official", official), ("ours", ours))
    )
    return [
        Row("epoch", title, "s", [official["running"]], [ours["running"]], 5,
            f"{official['steps']} and {ours['steps']} steps",
            f"without compiling, which took: {parts}"),
        Row("epoch_cold", "the same, compiling included", "s",
            [official["running"] + official["compiling"]], [ours["running"] + ours["compiling"]]),
    ]  # fmt: skip


def _official_epoch(settings: Settings) -> dict[str, float]:
    _use_xla_on_cpu()
    step = Step(settings, backends.make_backend("tpu"))
    samples = step.way.samples(settings.folder, "train", settings.size, settings.size)
    loader = DataLoader(samples, settings.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(step.way.samples(settings.folder, "test", settings.size, settings.size), 1)
    device = step.backend.device
    before = metrics.now()

    def work() -> None:
        step.theirs.train()
        for images, masks in loader:
            step.their_images, step.their_masks = images.to(device), masks.to(device)
            step.official()
        metrics = step.way.metrics(settings.size)
        step.theirs.eval()
        with torch.no_grad():
            for images, masks in test:
                _, fused = step.theirs(images.to(device), True)
                step.backend.sync()
                metrics.update(fused, masks.to(device))

    took = seconds(work)
    compiling = (metrics.now() - before).compile_seconds
    return {"running": took - compiling, "compiling": compiling, "steps": len(loader)}


def _our_epoch(settings: Settings) -> dict[str, float]:
    _use_xla_on_cpu()
    config = Config(
        batch_size=settings.batch_size, base_size=settings.size, crop_size=settings.size, epochs=2,
        warm_epoch=WARM_EPOCH, widths=settings.widths, depths=settings.depths,
    )  # fmt: skip
    backend = backends.make_backend("tpu")
    before = metrics.now()
    steps = 0

    def work() -> None:
        nonlocal steps
        data = DataFolder(settings.folder)
        stores = [SampleCache(data.samples(split), title="read images") for split in
                  ("train", "test")]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(config, backend, *stores, Path(folder))
            trainer.epoch = EPOCH
            trainer.fit(lambda text: None)
            steps = trainer.steps

    took = seconds(work)
    compiling = (metrics.now() - before).compile_seconds
    return {"running": took - compiling, "compiling": compiling, "steps": steps}


ROWS: dict[str, Callable[[Settings], list[Row]]] = {
    "xla_step": xla_step,
    "cpu_step": cpu_step,
    "loader": loader,
    "evaluation": evaluation,
    "evaluation_cpu": evaluation_cpu,
    "tpu_bytes": tpu_bytes,
    "epoch": epoch,
    "cuda_step": cuda_step,
}
