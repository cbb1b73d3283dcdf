"""What MSHNet's steps need on a TPU that is not there: ``mshnet aot``.

The steps are the trainer's own, traced on virtual cores; :mod:`tpuscope.aot` compiles them.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Adagrad

from tpuscope import aot
from tpuscope.aot.report import size
from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.tpu_specs import Topology, UnknownTopology
from tpuscope.errors import RequestError
from tpuscope.progress import someone_watches

from . import model_tpu
from .api import require_shares
from .loss import SLSIoULoss
from .model import MSHNet
from .training.backend import TPU_FLAGS, Backend, SpmdBackend, XlaBackend
from .training.config import Config
from .training.step import Normalize, evaluation_step, train_step

PHASES = ("train", "warmup", "eval")


@dataclass(frozen=True)
class Step:
    """A step of MSHNet on a TPU slice.

    Attributes:
        config: ``batch_size`` (global), ``base_size`` (side of the images), ``precision``,
            ``channels``, ``num_cores``, ``widths`` and ``depths`` count; the rest does not.
        phase: ``"train"`` (all heads), ``"warmup"`` (one head), or ``"eval"``.
        topology: the slice, with ``num_cores`` cores or more.
    """

    config: Config
    phase: str = "train"
    topology: str = "v5e:1x1"

    @property
    def images(self) -> int:
        """Of one core."""
        return self.config.batch_size // self.config.num_cores

    @property
    def fold(self) -> int:
        """What the network's ``fold`` is, on a TPU."""
        overrides = self.config.space_to_depth
        return model_tpu.default_fold(self.images) if overrides is None else overrides

    def as_dict(self) -> dict[str, Any]:
        """What was asked for, as plain values."""
        names = ("batch_size", "base_size", "precision", "channels")
        overrides = {name: getattr(self.config, name) for name in names}
        return overrides | {"space_to_depth": self.fold, "phase": self.phase}

    def __str__(self) -> str:
        """For people."""
        config = self.config
        what = {
            "train": "training step",
            "warmup": "training step of the warm-up",
            "eval": "test step",
        }
        return (
            f"{what[self.phase]}, batch {config.batch_size}, {config.base_size}×{config.base_size},"
            f" {config.precision}"
        )

    def with_images(self, images: int) -> "Step":
        """The same step with so many images on each core."""
        size = images * self.config.num_cores
        return replace(self, config=replace(self.config, batch_size=size))


def request(overrides: dict, phase: str, topology: str, num_cores: int | None = None) -> Step:
    """A step from a request, checked.

    Args:
        overrides: settings by the field names of :class:`~mshnet.training.config.Config`.
        phase: one of :data:`PHASES`.
        topology: the slice.
        num_cores: of the slice that take part; None takes all.

    Raises:
        RequestError: it cannot be compiled.
    """
    if phase not in PHASES:
        raise RequestError(f"--phase {phase}: must be one of {', '.join(PHASES)}")
    try:
        slice_ = Topology.parse(topology)
        aot.require_compiler()
        runtime.require_matching_versions()
    except UnknownTopology as error:
        raise RequestError(f"--topology {error}") from error
    except (aot.CompilerUnavailable, runtime.XlaUnavailable) as error:
        raise RequestError(str(error)) from error
    cores = slice_.cores if num_cores is None else num_cores
    if cores > slice_.cores:
        raise RequestError(f"--num-cores {cores}: {topology} has {slice_.cores}; use at most that")
    config = Config.from_dict(overrides | {"num_cores": cores})
    require_shares(config, cores)
    return Step(config, phase, str(slice_))


def compile_step(step: Step, effort: str = "fast", use_cache: bool = True) -> aot.Report:
    """Trace a step in a process of its own, and compile it in another.

    Raises:
        CompilerFailed: no answer.
    """
    return aot.compile_program(
        trace(step),
        step.topology,
        step.config.num_cores,
        effort,
        use_cache,
        someone_watches(),
        # XLA_FLAGS of this process are the CPU's.
        runtime.merge_flags({k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, TPU_FLAGS),
    )


def trace(step: Step) -> aot.Program:
    """The program of a step, in a process of its own: how many cores one has is settled once.

    Raises:
        CompilerFailed: that process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(_trace, step).result()
        except BrokenProcessPool as error:
            raise aot.CompilerFailed(
                "the process that traces the step was killed, as a machine does that runs out of "
                "memory: try a smaller batch"
            ) from error


def _trace(step: Step) -> aot.Program:
    """Of :func:`trace`, in a process that has opened no device."""
    config = step.config
    runtime.select_platform("CPU", config.num_cores)
    backend = (SpmdBackend if config.num_cores > 1 else XlaBackend)(config.precision)
    model = MSHNet(widths=config.widths, depths=config.depths)
    model.fold = step.fold
    size = config.base_size
    images = torch.zeros(config.batch_size, config.channels, size, size, dtype=torch.uint8)
    masks = torch.zeros(config.batch_size, 1, size // 8, size, dtype=torch.uint8)
    optimizer = backend.prepare(model, lambda m: Adagrad(m.parameters(), lr=config.lr), None)
    normalize = Normalize()
    backend.move(normalize)
    [batch] = backend.device_batches([[images, masks]])
    if step.phase == "eval":
        return aot.trace(_evaluation(backend, model.eval(), normalize), batch[:1])
    criterion, warm_epoch = SLSIoULoss(), config.warm_epoch
    epoch = warm_epoch if step.phase == "warmup" else warm_epoch + 1

    def training(images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return train_step(
            model, normalize, criterion, optimizer, backend, images, masks, warm_epoch, epoch
        )

    return aot.trace(training, batch)


def _evaluation(backend: Backend, model: MSHNet, normalize: Normalize) -> Callable:
    full = backend.to_device(torch.tensor([True]))

    def evaluation(images: torch.Tensor) -> torch.Tensor:
        return backend.replicate_output(evaluation_step(model, normalize, backend, images, full))

    return evaluation


def sweep(
    step: Step, effort: str = "fast", use_cache: bool = True
) -> Iterator[tuple[Step, aot.Report]]:
    """Look for the largest batch that fits, from the step's own on.

    Doubles the images of a core until they do not fit (or halves them until they do), then halves
    the gap that is left, down to an eighth of what fits, or one image.

    Yields:
        Every step that was compiled, in turn, and what the compiler says.
    """
    fits = too_many = None
    images = step.images
    while fits is None or too_many is None or too_many - fits > max(1, fits // 8):
        tried = step.with_images(images)
        report = compile_step(tried, effort, use_cache)
        yield tried, report
        if report.fits:
            fits = images
        else:
            too_many = images
        if too_many is None:
            images = 2 * fits
        elif fits is None:
            images = too_many // 2
        else:
            images = (fits + too_many) // 2
        if images == 0:
            return


SWEEP_HEAD = (
    f"{'images a core':>13}  {'global batch':>12}  {'memory':>24}  {'moved an image':>14}  "
    f"{'padding':>7}  {'at least':>12}  {'images/s at most':>16}"
)


def sweep_line(step: Step, report: aot.Report) -> str:
    """One line of a sweep, for people."""
    batch, needed = step.config.batch_size, size(report.hbm_bytes)
    verdict = "fits" if report.fits else "DOES NOT FIT"
    line = f"{step.images:>13}  {batch:>12}  {needed:>11} {verdict:<12}"
    if report.compiles:
        line += (
            f"  {size(report.bytes_accessed / step.images):>14}  {report.padding:>6.1f}×  "
            f"{1e3 * report.roofline_seconds:>9.2f} ms  {batch / report.roofline_seconds:>16,.0f}"
        )
    return line.rstrip()


def largest(tried: list[tuple[Step, aot.Report]]) -> Step | None:
    """The largest step that fits; None if no step does."""
    fitting = (step for step, report in tried if report.fits)
    return max(fitting, key=lambda step: step.images, default=None)


def sweep_summary(tried: list[tuple[Step, aot.Report]]) -> str:
    """What a sweep found, in a sentence."""
    best = largest(tried)
    if best is None:
        return f"not even one image on each core fits {tried[-1][0].topology}"
    too_many = min(step.config.batch_size for step, report in tried if not report.fits)
    return (
        f"the largest that fits: --batch-size {best.config.batch_size} ({best.images} images on "
        f"each core); {too_many} does not"
    )
