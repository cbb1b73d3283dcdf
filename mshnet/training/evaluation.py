"""Evaluation of a split: the host counts one batch while the device computes the next."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tpuscope.progress import progress

from ..data.bitmask import unpack
from ..data.loader import EvaluationSet, FilledBatches
from ..metrics import Definition, DetectionMetrics
from .backend import Backend, Step
from .config import Config
from .step import Normalize, evaluation_step


def compiled_evaluation(model: nn.Module, normalize: Normalize, backend: Backend) -> Step:
    """Return the step of :func:`evaluate`, to be reused by evaluations of the same model.

    From images, masks and phase to logits and masks, see :func:`.step.evaluation_step`.
    """

    def step(images: Tensor, masks: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
        logits = evaluation_step(model, normalize, backend, images, phase)
        return backend.replicate_output(logits), backend.replicate_output(masks)

    state = [*model.parameters(), *model.buffers(), *normalize.buffers()]
    return backend.compile_step(step, state)


def predict_batches(
    step: Step, backend: Backend, loader: DataLoader, full: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and masks of this process's batches on the host, (B, 1, H, W) each.

    A batch is fetched after the next one has been dispatched, so that device and host work at
    the same time.

    Args:
        step: of :func:`compiled_evaluation`; its model is in evaluation mode.
        backend: the device.
        loader: of the split.
        full: see :func:`evaluate`.
    """
    phase = backend.to_device(torch.tensor([full]))
    waiting = None
    for images, masks in backend.device_batches(loader):
        pair = step(images, masks, phase)
        if waiting is not None:
            yield _fetch(waiting)
        waiting = pair
    if waiting is not None:
        yield _fetch(waiting)


def _fetch(pair: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    logits, masks = pair
    return logits.cpu(), unpack(masks.cpu())


def evaluate(
    model: nn.Module,
    normalize: Normalize,
    backend: Backend,
    loader: DataLoader,
    full: bool = True,
    look: Callable[[int, Tensor], None] | None = None,
    step: Step | None = None,
) -> DetectionMetrics:
    """Return metrics over the loader's data set, the same in every process.

    Args:
        model: on the device; put into evaluation mode.
        normalize: on the device.
        backend: the device.
        loader: of the split.
        full: True evaluates the fused head, False the full-size head (during warm-up).
        look: receives the index of the first image of a batch and the logits of the batch on the
            host, (B, 1, H, W), for example for pictures.
        step: of :func:`compiled_evaluation`, for the same model; None makes one.
    """
    dataset, batches = loader.dataset, loader.batch_sampler
    assert isinstance(dataset, EvaluationSet) and isinstance(batches, FilledBatches)
    batch_size = batches.batch_size
    metrics = DetectionMetrics(dataset.size)
    model.eval()
    step = step or compiled_evaluation(model, normalize, backend)
    results = predict_batches(step, backend, loader, full)
    first = backend.output_shard.index * backend.output_shard.size(batch_size)
    for logits, masks in progress(results, "evaluate", len(loader)):
        count = min(max(len(dataset) - first, 0), len(logits))  # the rest is padding
        if count:
            metrics.update(logits[:count], masks[:count])
            if look:
                look(first, logits[:count])
        first += batch_size
    metrics.unpack(backend.sum_over_processes(metrics.pack()))
    return metrics


def protocol(config: Config, images: int, definition: str, epoch_choice: str) -> str:
    """Return the conditions of a result, which are printed with it."""
    size, colour = config.base_size, "grey" if config.channels == 1 else "colour"
    return (
        f"{definition} definition, test split ({images} images) at {size}×{size} {colour}, "
        f"threshold logit > 0, {epoch_choice}"
    )


def result_line(metrics: DetectionMetrics, definition: Definition, conditions: str) -> str:
    """Return one line for people: IoU, nIoU, Pd in percent, Fa in 1e-6, and the protocol."""
    result = metrics.compute(definition)
    return (
        f"IoU {100 * result['iou']:.2f}  nIoU {100 * result['niou']:.2f}  "
        f"PixAcc {100 * result['pixel_accuracy']:.2f}  Pd {100 * result['pd']:.2f}  "
        f"Fa {1e6 * result['fa']:.2f}e-6  [{conditions}]"
    )
