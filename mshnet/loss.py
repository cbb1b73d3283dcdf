"""Scale- and location-sensitive IoU loss (SLS loss) and its multi-scale training form.

Follows section 3 of "Infrared Small Target Detection with Scale and Location Sensitivity"
(CVPR 2024, arXiv 2403.19366) and the numbers of its official code. Everything is computed for
the whole batch at once, so the traced graph does not grow with the batch size.

Where the official formula gives no usable gradient this one differs, and only there:

* **A sample without target pixels.** Officially its IoU is 0 with gradient 0 in warm-up, so
  false alarms on it go unpunished, and 0/0 = NaN once the sigmoid underflows. Here its loss is
  w · P / (P + s): the IoU loss against a virtual target of s = 0.05 % of the map (at least 1 px)
  that the prediction overlaps fully, with weight w = 0.2; it has no location term. At full weight,
  or with a larger s, such samples push all predictions down in the first epochs, before the network
  has learned from positives, and with some seeds it ended up predicting nothing at all.
* **Saturated logits.** Beyond ±6 the sigmoid's slope falls below 0.0025 and soon to exactly 0,
  so a collapsed network stays collapsed. Here pixels that are saturated *and wrong* have that
  slope added, in the IoU and size terms; the loss value itself is unchanged.

``SLSIoULoss(official=True)`` switches both off.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-8  # the official location term's
SATURATION = 6.0  # logit beyond which the sigmoid's slope gets a floor on wrong pixels
VIRTUAL_TARGET = 1 / 2048  # share of the map, for samples without a target
EMPTY_WEIGHT = 0.2  # of samples without a target


def _leaky(logits: Tensor, p: Tensor, t: Tensor) -> Tensor:
    """Return p with a gradient that does not vanish on wrong pixels beyond ±SATURATION.

    Only on wrong pixels: correct background at −7 would otherwise be pushed down without limit.

    Args:
        logits: (B, H, W), float32.
        p: their sigmoid.
        t: mask of 0 and 1, (B, H, W).
    """
    edge = 1 / (1 + math.exp(-SATURATION))
    slope = edge * (1 - edge)
    value = logits.detach()
    wrong = torch.where(t > 0, value < -SATURATION, value > SATURATION)
    return p + torch.where(wrong, slope * (logits - value), 0.0)


def _centre(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return unnormalised first moments (x, y) of maps (B, H, W) as shares of a side, (B,) each."""
    height, width = p.shape[-2:]
    x = torch.arange(width, device=p.device, dtype=p.dtype) / width
    y = torch.arange(height, device=p.device, dtype=p.dtype) / height
    return (p.mean(1) * x).mean(1), (p.mean(2) * y).mean(1)


def _location_loss(p: Tensor, t: Tensor) -> Tensor:
    """Return the centres' difference in polar coordinates: (B, H, W) twice → (B,)."""
    x_p, y_p = _centre(p)
    x_t, y_t = _centre(t)
    angle_p = torch.atan(y_p / (x_p + EPSILON))
    angle_t = torch.atan(y_t / (x_t + EPSILON))
    angle = (4 / math.pi**2) * (angle_p - angle_t) ** 2
    length_p = torch.sqrt(x_p**2 + y_p**2 + EPSILON)
    length_t = torch.sqrt(x_t**2 + y_t**2 + EPSILON)
    ratio = torch.minimum(length_p, length_t) / (torch.maximum(length_p, length_t) + EPSILON)
    return 1 - ratio + angle


class SLSIoULoss(nn.Module):
    """IoU loss in warm-up; then IoU weighted by size agreement, plus a location term.

    Args:
        official: reproduce the official numbers also where they give no gradient or NaN
            (see the module's text).
    """

    def __init__(self, official: bool = False):
        super().__init__()
        self.official = official

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        warm_epoch: int,
        epoch: int,
        with_shape: bool = True,
    ) -> Tensor:
        """Return the mean loss over the batch, a float32 scalar.

        Args:
            logits: (B, 1, H, W), any float dtype; computed in float32.
            target: mask of 0 and 1, (B, 1, H, W), any dtype.
            warm_epoch: last epoch of the warm-up.
            epoch: current epoch, counted from 0. Decides which of the two graphs is traced, so
                it is a Python number, not a tensor.
            with_shape: False leaves the location term out.

        Raises:
            ValueError: the shapes differ.
        """
        if logits.shape != target.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} and target {tuple(target.shape)} must have "
                "the same shape (B, 1, H, W)"
            )
        logits = logits.squeeze(1).float()
        t = target.squeeze(1).float()
        plain = torch.sigmoid(logits)
        p = plain if self.official else _leaky(logits, plain, t)

        intersection = (p * t).sum((1, 2))
        p_sum = p.sum((1, 2))
        t_sum = t.sum((1, 2))
        empty = t_sum == 0
        union = p_sum + t_sum - intersection
        if self.official:
            iou = intersection / union
        else:
            # The inner `where` keeps 0/0 out of the branch that the outer one discards: its
            # gradient would be NaN even there.
            virtual = max(1.0, VIRTUAL_TARGET * t[0].numel())
            silence = 1 - EMPTY_WEIGHT * p_sum / (p_sum + virtual)
            iou = torch.where(empty, silence, intersection / torch.where(empty, 1.0, union))
        if epoch <= warm_epoch:
            return 1 - iou.mean()

        spread = ((p_sum - t_sum) / 2) ** 2
        smaller = torch.minimum(p_sum, t_sum) + spread
        larger = torch.maximum(p_sum, t_sum) + spread
        # Without the gradient floor: where p is almost 0, the angle's gradient reaches 1/EPSILON,
        # and only the sigmoid's vanishing slope keeps the product small.
        location = _location_loss(plain, t)
        if self.official:
            alpha = smaller / larger
        else:
            alpha = torch.where(empty, 1.0, smaller / torch.where(empty, 1.0, larger))
            location = torch.where(empty, 0.0, location)
        loss = 1 - (alpha * iou).mean()
        return loss + location.mean() if with_shape else loss


def multiscale_loss(
    criterion: SLSIoULoss,
    scales: Sequence[Tensor],
    fused: Tensor,
    mask: Tensor,
    warm_epoch: int,
    epoch: int,
) -> Tensor:
    """Return the training objective: the mean of the loss on the fused map and every scale.

    Args:
        scales: logit maps of :class:`~mshnet.model.MSHNet`, finest first; empty in warm-up.
        fused: (B, 1, H, W) logits.
        mask: (B, 1, H, W), 0 or 1, floating point; max-pooled by 2 from scale to scale.
    """
    total = criterion(fused, mask, warm_epoch, epoch)
    for i, logits in enumerate(scales):
        if i > 0:
            mask = F.max_pool2d(mask, 2)
        total = total + criterion(logits, mask, warm_epoch, epoch)
    return total / (len(scales) + 1)
