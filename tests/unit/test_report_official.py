"""``benchmarks/official.py``, our own version of the official step: the package's numbers.

Lesson 07 runs and reports both.
"""

from pathlib import Path

import pytest
import torch

from mshnet import MSHNet, SLSIoULoss
from mshnet.loss import multiscale_loss

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NETWORK = {"widths": (2, 2, 2, 2, 2), "depths": (1, 2, 1, 1, 1)}


@pytest.fixture
def official(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import official

    return official


@pytest.fixture
def models(official):
    """Ours and the official one, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = MSHNet(**NETWORK), official.OfficialMSHNet(**NETWORK)
    theirs.load_state_dict(ours.state_dict())
    assert list(theirs.state_dict()) == list(ours.state_dict())
    return ours, theirs


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    masks = torch.zeros(3, 1, 32, 32)
    masks[:, :, 8:11, 20:24] = 1
    return torch.randn(3, 3, 32, 32, generator=generator), masks


@pytest.mark.parametrize("full", [False, True])
def test_the_network_gives_the_same_logits(models, batch, full):
    results = [model(batch[0], full) for model in models]
    for a, b in zip(*((*scales, fused) for scales, fused in results), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_step_has_the_same_loss_and_makes_the_same_weights(official, models, batch, epoch):
    losses = []
    for model in models:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        if model is models[0]:
            scales, fused = model(batch[0], epoch > 0)
            loss = multiscale_loss(SLSIoULoss(official=True), scales, fused, batch[1], 0, epoch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        else:
            losses.append(official.official_step(model, optimizer, *batch, 0, epoch))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    gradients = [p.grad for p in models[0].parameters() if p.grad is not None]
    others = [p.grad for p in models[1].parameters() if p.grad is not None]
    for a, b in zip(gradients, others, strict=True):
        assert torch.allclose(a, b, atol=1e-4 * max(1, a.abs().max().item()))


def test_a_size_that_cannot_be_is_refused_in_one_line(official, capsys):
    import report_official

    assert report_official.main(["--size", "40"]) == 2
    assert capsys.readouterr().err == (
        "report_official: --size 40: must be a multiple of 16, for example 64\n"
    )
