"""The loss against its specification, and where it departs from the official formula."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.nn import functional as F

from mshnet import SLSIoULoss
from mshnet.loss import multiscale_loss

WARM_EPOCH = 5
PHASES = pytest.mark.parametrize("epoch", [0, 9], ids=["warm-up", "full"])


def loss_and_gradient(logits, mask, epoch, official=False, **options):
    logits = logits.clone().requires_grad_()
    loss = SLSIoULoss(official)(logits, mask, WARM_EPOCH, epoch, **options)
    loss.backward()
    return loss.item(), logits.grad


def flat(value, size=16, batch=1):
    return torch.full((batch, 1, size, size), float(value))


def one_target(size=16, batch=1):
    mask = torch.zeros(batch, 1, size, size)
    mask[..., 4:7, 9:12] = 1
    return mask


# --- the specification ---------------------------------------------------------------------------


def polar(m):
    """Angle and length of the unnormalised first moments of one map, pixel by pixel."""
    height, width = m.shape
    cx = sum(m[y, x] * x / width for y in range(height) for x in range(width)) / m.size
    cy = sum(m[y, x] * y / height for y in range(height) for x in range(width)) / m.size
    return math.atan(cy / (cx + 1e-8)), math.sqrt(cx**2 + cy**2 + 1e-8)


def specified_loss(logits, mask, full, with_shape=True):
    """One sample after the other, in double precision."""
    overlaps, locations = [], []
    for z, t in zip(logits.astype(float), mask.astype(float), strict=True):
        p = 1 / (1 + np.exp(-z))
        both, p_sum, t_sum = (p * t).sum(), p.sum(), t.sum()
        iou = both / (p_sum + t_sum - both)
        d = ((p_sum - t_sum) / 2) ** 2
        alpha = (min(p_sum, t_sum) + d) / (max(p_sum, t_sum) + d)
        overlaps.append(alpha * iou if full else iou)
        (angle_p, length_p), (angle_t, length_t) = polar(p), polar(t)
        ratio = min(length_p, length_t) / (max(length_p, length_t) + 1e-8)
        locations.append(1 - ratio + 4 / math.pi**2 * (angle_p - angle_t) ** 2)
    loss = 1 - np.mean(overlaps)
    return loss + np.mean(locations) if full and with_shape else loss


@st.composite
def maps_with_targets(draw):
    """Logits float32 and masks 0/1, (B, H, W); every mask holds a target."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(2, 7), st.integers(2, 7)))
    masks = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1)))
    masks[:, draw(st.integers(0, shape[1] - 1)), draw(st.integers(0, shape[2] - 1))] = 1
    logits = draw(hnp.arrays(np.float32, shape, elements=st.floats(-9, 9, width=32)))
    return logits, masks


@settings(max_examples=25, deadline=None)
@given(maps=maps_with_targets(), official=st.booleans(), with_shape=st.booleans())
def test_the_loss_is_the_specified_one(maps, official, with_shape):
    logits, masks = maps
    criterion = SLSIoULoss(official)
    for epoch, full in ((0, False), (WARM_EPOCH, False), (WARM_EPOCH + 1, True)):
        loss = criterion(
            torch.from_numpy(logits[:, None]),
            torch.from_numpy(masks[:, None]),
            WARM_EPOCH,
            epoch,
            with_shape,
        )
        expected = specified_loss(logits, masks, full, with_shape)
        assert loss.item() == pytest.approx(expected, abs=1e-5), f"epoch {epoch}"


def test_a_perfect_prediction_costs_nothing():
    mask = one_target()
    for epoch in (0, 9):
        loss = SLSIoULoss()(mask * 40 - 20, mask, WARM_EPOCH, epoch)
        assert loss.item() == pytest.approx(0, abs=1e-4)


def test_without_the_shape_term_the_full_loss_is_smaller():
    mask = one_target()
    logits = torch.roll(mask, (6, -6), (2, 3)) * 8 - 4  # a blob at the wrong place
    with_term, without = (
        SLSIoULoss()(logits, mask, WARM_EPOCH, 9, with_shape=flag).item() for flag in (True, False)
    )
    assert without < with_term - 0.05


@PHASES
def test_the_order_of_the_batch_does_not_matter(epoch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1, 16, 16, generator=generator) * 4
    mask = (torch.rand(4, 1, 16, 16, generator=generator) > 0.95).float()
    mask[2] = 0
    order = torch.tensor([2, 0, 3, 1])
    loss, gradient = loss_and_gradient(logits, mask, epoch)
    shuffled_loss, shuffled_gradient = loss_and_gradient(logits[order], mask[order], epoch)
    assert shuffled_loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(shuffled_gradient, gradient[order])


# --- samples without a target --------------------------------------------------------------------


def test_officially_false_alarms_on_an_empty_sample_go_unpunished():
    loss, gradient = loss_and_gradient(flat(1), torch.zeros(1, 1, 16, 16), 0, official=True)
    assert loss == 1
    assert not gradient.any()


@PHASES
def test_officially_a_silent_network_on_an_empty_sample_gives_nan(epoch):
    loss, gradient = loss_and_gradient(flat(-120), torch.zeros(1, 1, 16, 16), epoch, official=True)
    assert math.isnan(loss)
    assert gradient.isnan().all()


@PHASES
@pytest.mark.parametrize("value", [-30, -4, 0, 4, 30, 120])
def test_an_empty_sample_pushes_every_logit_down(epoch, value):
    loss, gradient = loss_and_gradient(flat(value), torch.zeros(1, 1, 16, 16), epoch)
    assert 0 <= loss <= 1
    assert gradient.isfinite().all()
    assert (gradient > 0).all()


@PHASES
def test_a_silent_map_on_an_empty_sample_is_a_perfect_answer(epoch):
    loss, gradient = loss_and_gradient(flat(-120), torch.zeros(1, 1, 16, 16), epoch)
    assert loss == 0
    assert (gradient == 0).all()


@PHASES
def test_fewer_false_alarms_on_an_empty_sample_cost_less(epoch):
    empty = torch.zeros(1, 1, 32, 32)
    losses = []
    for side in (16, 8, 4, 2, 1, 0):
        logits = flat(-20, 32)
        logits[..., :side, :side] = 6
        losses.append(SLSIoULoss()(logits, empty, WARM_EPOCH, epoch).item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)
    assert losses[-1] < 0.001


@PHASES
@pytest.mark.parametrize("value", [-120, 0, 120])
def test_an_empty_sample_leaves_its_neighbours_gradient_alone(epoch, value):
    logits = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    mask = one_target()
    alone, gradient_alone = loss_and_gradient(logits, mask, epoch)
    both, gradient = loss_and_gradient(
        torch.cat([flat(value), logits]), torch.cat([torch.zeros_like(mask), mask]), epoch
    )
    empty, _ = loss_and_gradient(flat(value), torch.zeros_like(mask), epoch)
    assert both == pytest.approx((alone + empty) / 2, rel=1e-5)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient[1:] * 2, gradient_alone, rtol=1e-4, atol=1e-7)


def test_officially_a_batch_with_an_empty_silent_sample_is_lost():
    logits = torch.cat([flat(-120), flat(0)])
    mask = torch.cat([torch.zeros(1, 1, 16, 16), one_target()])
    loss, _ = loss_and_gradient(logits, mask, 9, official=True)
    assert math.isnan(loss)


# --- saturated logits ----------------------------------------------------------------------------


@PHASES
@pytest.mark.parametrize("value", [-100, 100])
def test_officially_a_saturated_map_gets_no_gradient(epoch, value):
    _, gradient = loss_and_gradient(flat(value), one_target(), epoch, official=True)
    assert not gradient.any()


@PHASES
@pytest.mark.parametrize("value", [-100, 100])
def test_a_saturated_map_is_pushed_towards_its_target(epoch, value):
    mask = one_target()
    loss, gradient = loss_and_gradient(flat(value), mask, epoch, with_shape=False)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    # Only wrong pixels get a gradient: the right ones are saturated.
    wrong = (mask == 1) if value < 0 else (mask == 0)
    towards = -1 if value < 0 else 1
    assert (towards * gradient[wrong] > 0).all()
    assert (gradient[~wrong] == 0).all()


@PHASES
def test_saturation_does_not_change_the_value(epoch):
    mask = one_target()
    logits = torch.where(mask == 1, -30.0, 14.0)
    ours, official = (SLSIoULoss(flag)(logits, mask, WARM_EPOCH, epoch) for flag in (False, True))
    assert ours.item() == pytest.approx(official.item(), rel=1e-6)


@PHASES
def test_a_collapsed_map_gets_no_larger_gradient_than_a_fresh_one(epoch):
    """One outsized step would stay in Adagrad's sums and slow down the rest of the run."""
    mask = one_target()
    fresh = loss_and_gradient(flat(-3), mask, epoch)[1].sum().abs()
    collapsed = loss_and_gradient(flat(-40), mask, epoch)[1].sum().abs()
    assert 0 < collapsed <= 10 * fresh


@PHASES
@pytest.mark.parametrize("value", [-100, 100])
def test_adagrad_leads_out_of_saturation(epoch, value):
    mask = one_target()
    logits = flat(value).requires_grad_()
    optimizer = torch.optim.Adagrad([logits], lr=20)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = SLSIoULoss()(logits, mask, WARM_EPOCH, epoch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9
    assert losses[-1] < 0.1


# --- types and shapes ----------------------------------------------------------------------------


@PHASES
def test_bf16_logits_are_computed_in_float32(epoch):
    logits = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = one_target(32, 2)
    loss = SLSIoULoss()(logits, mask, WARM_EPOCH, epoch)
    assert loss.dtype == torch.float32
    assert loss.item() == SLSIoULoss()(logits.float(), mask, WARM_EPOCH, epoch).item()


@PHASES
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.float64])
def test_the_mask_may_have_any_dtype(epoch, dtype):
    mask = one_target()
    expected = SLSIoULoss()(flat(0), mask, WARM_EPOCH, epoch)
    assert SLSIoULoss()(flat(0), mask.to(dtype), WARM_EPOCH, epoch) == expected


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 1, 16, 16), (1, 16, 16)])
def test_differing_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="same shape") as caught:
        SLSIoULoss()(flat(0), torch.zeros(shape), WARM_EPOCH, 0)
    assert str(shape) in str(caught.value)


# --- all scales ----------------------------------------------------------------------------------


def test_the_training_loss_is_the_mean_over_fused_and_scales():
    generator = torch.Generator().manual_seed(0)
    fused, *scales = (torch.randn(2, 1, s, s, generator=generator) * 3 for s in (32, 32, 16, 8, 4))
    mask = one_target(32, 2)
    criterion = SLSIoULoss()
    expected = [criterion(fused, mask, WARM_EPOCH, 9)]
    for logits, factor in zip(scales, (1, 2, 4, 8), strict=True):
        pooled = F.max_pool2d(mask, factor)
        assert pooled.shape == logits.shape
        expected.append(criterion(logits, pooled, WARM_EPOCH, 9))
    loss = multiscale_loss(criterion, scales, fused, mask, WARM_EPOCH, 9)
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-6)


def test_in_warm_up_the_training_loss_is_that_of_the_only_map():
    mask, criterion = one_target(), SLSIoULoss()
    loss = multiscale_loss(criterion, [], flat(0), mask, WARM_EPOCH, 0)
    assert loss == criterion(flat(0), mask, WARM_EPOCH, 0)
