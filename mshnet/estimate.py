"""Estimate memory and time of MSHNet's steps with the TPU's compiler: ``mshnet aot``.

The steps are the trainer's, traced on virtual cores; :mod:`tpuscope.aot` compiles them.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.optim import Adagrad
from torch.utils.data import DataLoader

from tpuscope import aot
from tpuscope.aot.report import size
from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.tpu_specs import Topology, UnknownTopology
from tpuscope.errors import RequestError
from tpuscope.progress import someone_watches

from . import model_tpu
from .choices import PHASES
from .loss import SLSIoULoss
from .model import MSHNet
from .training.backend import TPU_FLAGS, Backend, SpmdBackend, XlaBackend
from .training.config import Config, default_batch_size
from .training.step import Normalize, evaluation_step, train_step


@dataclass(frozen=True)
class Step:
    """A step of MSHNet on a TPU slice.

    Attributes:
        config: ``batch_size`` (global), ``base_size`` (side of the images), ``precision``,
            ``channels``, ``num_cores``, ``widths`` and ``depths`` matter; the rest does not.
        phase: ``"train"`` (all heads), ``"warmup"`` (one head), or ``"eval"``.
        topology: the slice, with ``num_cores`` cores or more.
        compiler: a Python that has jax and libtpu; None for the default.
    """

    config: Config
    phase: str = "train"
    topology: str = "v5e:1x1"
    compiler: str | None = None

    @property
    def images(self) -> int:
        """Images a step on each core."""
        return self.config.batch_size // self.config.num_cores

    @property
    def fold(self) -> int:
        """The network's ``fold`` on a TPU."""
        requested = self.config.space_to_depth
        return model_tpu.default_fold(self.images) if requested is None else requested

    def as_dict(self) -> dict[str, Any]:
        """Return the request as plain values."""
        names = ("batch_size", "base_size", "precision", "channels")
        values = {name: getattr(self.config, name) for name in names}
        return values | {"space_to_depth": self.fold, "phase": self.phase}

    def __str__(self) -> str:
        """Return a description for people."""
        config = self.config
        what = {
            "train": "training step",
            "warmup": "training step of the warm-up",
            "eval": "evaluation step",
        }
        return (
            f"{what[self.phase]}, batch {config.batch_size}, {config.base_size}×{config.base_size},"
            f" {config.precision}"
        )

    def with_images(self, images: int) -> "Step":
        """Return the same step with another number of images on each core."""
        batch_size = images * self.config.num_cores
        return replace(self, config=replace(self.config, batch_size=batch_size))


def request(
    overrides: dict,
    phase: str,
    topology: str,
    num_cores: int | None = None,
    compiler: str | None = None,
) -> Step:
    """Return the step of a request, checked.

    Args:
        overrides: settings by the field names of :class:`~mshnet.training.config.Config`. The
            default batch is the smallest one of 32 images or more that the cores share.
        phase: one of :data:`~mshnet.choices.PHASES`.
        topology: the slice.
        num_cores: cores of the slice that are used; None for all.
        compiler: a Python that has jax and libtpu; None for the default.

    Raises:
        RequestError: it cannot be compiled.
    """
    if phase not in PHASES:
        raise RequestError(f"--phase {phase}: must be one of {', '.join(PHASES)}", "unknown-choice")
    try:
        slice_ = Topology.parse(topology)
        compiler = aot.require_compiler(compiler, slice_).python
        runtime.require_matching_versions()
    except UnknownTopology as error:
        raise RequestError(f"--topology {error}", "unknown-topology") from error
    except (aot.CompilerUnavailable, runtime.XlaUnavailable) as error:
        raise RequestError(str(error), "no-compiler") from error
    cores = slice_.cores if num_cores is None else num_cores
    if cores > slice_.cores:
        raise RequestError(
            f"--num-cores {cores}: {topology} has {slice_.cores}; use at most that", "cores"
        )
    config = Config.from_dict(overrides | {"num_cores": cores})
    if "batch_size" not in overrides:
        config = replace(config, batch_size=default_batch_size(cores, 32))
    config.require_even_shares(cores)
    return Step(config, phase, str(slice_), compiler)


def compile_step(step: Step, effort: str = "fast", use_cache: bool = True) -> aot.Report:
    """Trace a step in one process of its own and compile it in another.

    Raises:
        CompilerFailed: the compiler was killed, or cannot compile the step.
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
        step.compiler,
    )


def trace(step: Step) -> aot.Program:
    """Trace a step in a process of its own: a process cannot change its number of cores.

    Raises:
        CompilerFailed: that process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(_trace, step).result()
        except BrokenProcessPool as error:
            raise aot.CompilerFailed(
                "the process that traces the step was killed, probably because the machine is out "
                "of memory: try a smaller batch"
            ) from error


def _trace(step: Step) -> aot.Program:
    """Trace a step in this process, which must not have opened a device."""
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
    [batch] = backend.device_batches(cast(DataLoader, [[images, masks]]))
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
            images *= 2
        elif fits is None:
            images //= 2
        else:
            images = (fits + too_many) // 2
        if images == 0:
            return


SWEEP_HEAD = (
    f"{'images a core':>13}  {'global batch':>12}  {'memory':>24}  {'moved an image':>14}  "
    f"{'padding':>7}  {'at least':>12}  {'images/s at most':>16}"
)


def sweep_line(step: Step, report: aot.Report) -> str:
    """Return one line of a sweep, for people."""
    batch, needed = step.config.batch_size, size(report.hbm_bytes)
    verdict = "fits" if report.fits else "DOES NOT FIT"
    line = f"{step.images:>13}  {batch:>12}  {needed:>11} {verdict:<12}"
    if report.bytes_accessed and report.roofline_seconds:
        line += (
            f"  {size(report.bytes_accessed / step.images):>14}  {report.padding:>6.1f}×  "
            f"{1e3 * report.roofline_seconds:>9.2f} ms  {batch / report.roofline_seconds:>16,.0f}"
        )
    return line.rstrip()


def largest(tried: list[tuple[Step, aot.Report]]) -> Step | None:
    """Return the largest step that fits; None if no step fits."""
    fitting = (step for step, report in tried if report.fits)
    return max(fitting, key=lambda step: step.images, default=None)


def sweep_summary(tried: list[tuple[Step, aot.Report]]) -> str:
    """Return the result of a sweep, one line for people."""
    best = largest(tried)
    if best is None:
        return f"not even one image on each core fits {tried[-1][0].topology}"
    too_many = min(step.config.batch_size for step, report in tried if not report.fits)
    return (
        f"the largest that fits: --batch-size {best.config.batch_size} ({best.images} images on "
        f"each core); {too_many} does not"
    )
