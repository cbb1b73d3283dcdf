"""Parity with the official network, loss, optimizer trajectory and metrics.

The golden values come from the official code. Weights and inputs are pure functions of a name
(``tests/unit/golden/weights.py``), so no weight file is needed.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mshnet import DetectionMetrics, MSHNet, SLSIoULoss
from mshnet.loss import multiscale_loss

GOLDEN = Path(__file__).parent / "golden"
SIZE = 64

_spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "golden.npz") as values:
        return dict(values)


@pytest.fixture(params=[0, 1, 8], ids=["standard", "TPU form", "TPU form, space-to-depth 8"])
def model(request):
    net = MSHNet(3)
    net.fold = request.param
    net.load_state_dict(
        {
            key: torch.from_numpy(np.asarray(make.golden_parameter(key, tuple(value.shape))))
            for key, value in net.state_dict().items()
        }
    )
    return net


@pytest.fixture(scope="module")
def batch():
    return (
        torch.from_numpy(make.golden_image("x", 2, SIZE)),
        torch.from_numpy(make.golden_mask("y", 2, SIZE)),
    )


def assert_close(actual, expected, relative):
    """Largest difference relative to the largest expected magnitude."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= relative, f"relative error {error:.2e} > {relative:.0e}"


def test_state_dict_keys_and_shapes_are_the_official_ones_in_order():
    expected = json.loads((GOLDEN / "state_dict.json").read_text())
    actual = {key: list(value.shape) for key, value in MSHNet(3).state_dict().items()}
    assert list(actual) == list(expected)
    assert actual == expected


def test_outputs(golden, model, batch):
    model.eval()
    with torch.no_grad():
        scales, fused = model(batch[0], True)
        none, warm = model(batch[0], False)
    assert none == []
    assert_close(fused, golden["eval_fused"], 1e-5)
    assert_close(warm, golden["eval_warm"], 1e-5)
    for i, logits in enumerate(scales):
        assert_close(logits, golden[f"eval_scale{i}"], 1e-5)


@pytest.mark.parametrize("official", [True, False])
def test_loss_values(golden, batch, official):
    criterion = SLSIoULoss(official=official)
    fused = torch.from_numpy(golden["eval_fused"])
    assert_close(criterion(fused, batch[1], 5, 0), golden["loss_warmup"], 1e-5)
    assert_close(criterion(fused, batch[1], 5, 9), golden["loss_sls"], 1e-5)


def train_four_steps(model, batch, criterion):
    """Losses of two warm-up and two full steps, and the gradient norms of the first."""
    images, mask = batch
    model.train()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses, norms = [], None
    for epoch in (0, 0, 9, 9):
        scales, fused = model(images, epoch > 5)
        loss = multiscale_loss(criterion, scales, fused, mask, 5, epoch)
        optimizer.zero_grad()
        loss.backward()
        if norms is None:
            norms = [0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("official", [True, False])
def test_first_gradients_and_four_step_trajectory(golden, model, batch, official):
    losses, norms = train_four_steps(model, batch, SLSIoULoss(official=official))
    print("losses", losses, "golden", golden["train_losses"].tolist())
    assert_close(norms, golden["grad_norms_step0"], 1e-4)
    assert_close(losses[:2], golden["train_losses"][:2], 1e-4)
    assert_close(losses[2], golden["train_losses"][2], 1e-4 if model.fold == 0 else 1e-3)
    # The gradient of a bias before batch norm is rounding noise (1e-9), which Adagrad's first
    # steps scale up to ±lr. So the order of additions shows after a few steps: measured 1.2e-4
    # in step 3 and 9e-4 in step 4 between folded and not, and in step 4 1.3e-4
    # between one thread and two with interpolation as in the official code, 1.3e-3 in float64.
    assert_close(losses[3], golden["train_losses"][3], 3e-3)


def test_metrics(golden):
    target = make.golden_mask("t", 12, SIZE)
    logits = target * 8 - 4 + 1.6 * make.golden_array("n", target.shape)
    metrics = DetectionMetrics(size=SIZE, definition="official")
    metrics.update(logits, target)
    result = metrics.compute()
    for ours, theirs in (("iou", "iou"), ("pixel_accuracy", "pixacc"), ("pd", "pd"), ("fa", "fa")):
        assert result[ours] == pytest.approx(float(golden[f"metric_{theirs}"]), rel=1e-6), ours
    assert_close(result["roc"]["tpr"], golden["metric_roc_tpr"], 1e-6)
    assert_close(result["roc"]["fpr"], golden["metric_roc_fpr"], 1e-6)
