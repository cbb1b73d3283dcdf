"""The two computations that run on the device: a training step and an evaluation step."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.bitmask import unpack
from ..loss import SLSIoULoss, multiscale_loss
from .backend import Backend, Step

# ImageNet statistics, as the official code normalises.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """Normalises images: uint8 (B, 1 or 3, H, W) → float32 (B, 3, H, W).

    It runs on the device, so that only 8-bit images are transferred.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer(
            "scale", 1 / torch.tensor(DEVIATION).view(1, 3, 1, 1), persistent=False
        )

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) * self.scale


def train_step(
    model: nn.Module,
    normalize: Normalize,
    criterion: SLSIoULoss,
    optimizer: Optimizer,
    backend: Backend,
    images: Tensor,
    masks: Tensor,
    warm_epoch: int,
    epoch: int,
) -> Tensor:
    """Run forward pass, loss, backward pass and update.

    Args:
        images: uint8, (B, C, H, W), on the device.
        masks: of :func:`mshnet.data.bitmask.pack`, uint8, (B, 1, H/8, W), on the device.
        warm_epoch: last epoch of the warm-up, counted from 0.
        epoch: of this step; selects the phase and the loss.

    Returns:
        The loss, a float32 scalar that stays on the device.
    """
    with backend.autocast():
        scales, fused = model(normalize(images), epoch > warm_epoch)
    target = unpack(masks).float()
    loss = multiscale_loss(criterion, scales, fused, target, warm_epoch, epoch)
    loss.backward()
    backend.optimizer_step(optimizer)
    # Here and not before the next step: tensors alive at the end of a step become its outputs.
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def summed_step(
    model: nn.Module,
    normalize: Normalize,
    criterion: SLSIoULoss,
    optimizer: Optimizer,
    backend: Backend,
    warm_epoch: int,
    epoch: int,
) -> tuple[Step, list[Tensor]]:
    """Return :func:`train_step` for :meth:`~mshnet.training.backend.Backend.compile_step`.

    Returns:
        The step, from images, masks and the sum of the losses so far, float32 (1,), to that sum
        with its own loss; and the other tensors that it reads and changes.
    """

    def step(images: Tensor, masks: Tensor, total: Tensor) -> tuple[Tensor]:
        loss = train_step(
            model, normalize, criterion, optimizer, backend, images, masks, warm_epoch, epoch
        )
        return (backend.replicate_output(total + backend.mean_loss(loss)),)

    state = [*model.parameters(), *model.buffers(), *normalize.buffers()]
    return step, state + [value for slots in optimizer.state.values() for value in slots.values()]


@torch.no_grad()
def evaluation_step(
    model: nn.Module, normalize: Normalize, backend: Backend, images: Tensor, full: Tensor
) -> Tensor:
    """Return the logits of the head of this phase, float32, (B, 1, H, W), on the device.

    Args:
        images: uint8, (B, C, H, W), on the device.
        full: bool, (1,), on the device: the fused head if True, the full-size head if False.
            Data, not a Python value, so that one graph serves both phases.
    """
    with backend.autocast():
        scales, fused = model(normalize(images), True)
    return torch.where(full, fused.float(), scales[0].float())
