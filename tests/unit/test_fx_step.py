"""Steps as one program on eager engines; the backend ``eager`` runs the graph as it is."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from tpuscope.engine import fx_step
from tpuscope.engine.fx_step import FxStep

STEPS = 5


class Training:
    """A small model, its optimizer and a step."""

    def __init__(self, optimizer=torch.optim.SGD, dropout=0.0, clip=False, **settings):
        torch.manual_seed(0)
        # Without a bias: in front of a batch norm its gradient is nothing but rounding.
        self.model = nn.Sequential(
            nn.Linear(4, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(8, 1),
        )
        self.optimizer = optimizer(self.model.parameters(), **({"lr": 0.1} | settings))
        self.clip = clip
        # The optimizer's sums have to exist before the first step.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = rate

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        loss = ((self.model(x) - y) ** 2).mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (loss.detach(),)

    def tensors(self) -> list[Tensor]:
        slots = [v for values in self.optimizer.state.values() for v in values.values()]
        found = [*self.model.parameters(), *self.model.buffers(), *slots]
        return [t for t in found if isinstance(t, Tensor)]

    def one_program(self, step=None) -> FxStep:
        tensors = self.tensors()
        return FxStep(
            step or self.step,
            [t for t in tensors if t.dim() > 0],
            [t for t in tensors if t.dim() == 0],
            [self.optimizer],
            "eager",
        )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 4, generator=generator) for _ in range(STEPS)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def run(training: Training, step, before=lambda index: None) -> list[float]:
    torch.manual_seed(7)
    losses = []
    for index, batch in enumerate(batches()):
        before(index)
        [loss] = step(*batch)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "clip": True},
        {"optimizer": torch.optim.Adagrad},
        {"momentum": 0.9, "dropout": 0.5},
    ],
    ids=["SGD", "momentum and clipping", "Adagrad", "dropout"],
)
def test_one_program_is_the_step(settings):
    plain, training = Training(**settings), Training(**settings)
    step = training.one_program()
    expected, losses = run(plain, plain.step), run(training, step)
    assert step.fallback_reason is None
    assert step.compilations == 1
    # Batch norm is computed by other operations: equal but for rounding.
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, other in zip(training.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    assert training.model[1].num_batches_tracked == plain.model[1].num_batches_tracked == STEPS


def test_a_constant_that_the_step_makes_is_part_of_the_program():
    plain, training = Training(), Training()

    def scaled(of):
        return lambda x, y: of.step(x * torch.tensor([1.0, 2.0, 0.5, 1.0]) / torch.tensor(2.0), y)

    step = training.one_program(scaled(training))
    assert run(training, step) == pytest.approx(run(plain, scaled(plain)), rel=1e-5)
    assert step.fallback_reason is None


def test_running_statistics_move_although_the_schema_hides_it():
    training = Training()
    run(training, training.one_program())
    assert training.model[1].running_mean.abs().min() > 0


def test_tracing_changes_nothing():
    """A step was once traced with momentum's real sums: those of an earlier step, not zeros."""
    training = Training(momentum=0.9)
    step = training.one_program()
    step(*batches()[0])  # the sums are no longer zeros
    before = copy.deepcopy(training.tensors())
    tensors = training.tensors()
    state = [t for t in tensors if t.dim() > 0]
    counted = [t for t in tensors if t.dim() == 0]
    fx_step._Trace(training.step, state, counted, batches()[1])
    for now, then in zip(training.tensors(), before, strict=True):
        assert torch.equal(now, then)
    assert all(p.grad is None for p in training.model.parameters())


def test_a_learning_rate_that_changes_gets_a_program_of_its_own():
    plain, training = Training(), Training()
    step = training.one_program()

    def lower(of):
        def before(index):
            of.optimizer.param_groups[0]["lr"] = 0.01 if index >= 3 else 0.1

        return before

    assert run(training, step, lower(training)) == pytest.approx(
        run(plain, plain.step, lower(plain)), rel=1e-5
    )
    assert step.compilations == 2
    assert step.fallback_reason is None


def test_a_rate_that_changes_in_every_call_is_named_and_not_repeated():
    plain, training = Training(), Training()
    step = training.one_program()

    def decay(of):
        def before(index):
            of.optimizer.param_groups[0]["lr"] = 0.1 / (index + 1)

        return before

    losses = run(training, step, decay(training))
    assert losses == pytest.approx(run(plain, plain.step, decay(plain)), rel=1e-5)
    assert "changes in every call" in step.fallback_reason
    assert "lr" in step.fallback_reason


def test_a_bias_correction_by_the_count_of_steps_is_found_at_the_second_call():
    plain, training = (Training(torch.optim.AdamW) for _ in range(2))
    step = training.one_program()
    assert run(training, step) == pytest.approx(run(plain, plain.step), rel=1e-5)
    assert "numbers differ" in step.fallback_reason


def reads(training, x, y):
    [loss] = training.step(x, y)
    if loss.item() > 1e9:
        raise AssertionError
    return (loss,)


def draws(training, x, y):
    return training.step(x * random.choice([1.0, 1.0]), y)


WEIGHTS = torch.ones(4)


def stranger(training, x, y):
    return training.step(x * WEIGHTS, y)


def attached(training, x, y):
    return (((training.model(x) - y) ** 2).mean(),)


def leaves_gradients(training, x, y):
    loss = ((training.model(x) - y) ** 2).mean()
    loss.backward()
    return (loss.detach(),)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (reads, "reads a value of a tensor: aten._local_scalar_dense"),
        (draws, "draws random numbers on the host"),
        (stranger, "reads 1 tensors of shape (4,), neither state nor arguments"),
        (attached, "requires grad: detach it"),
        (leaves_gradients, "leaves 5 gradients behind"),
    ],
)
def test_what_cannot_be_one_program_runs_as_it_is_and_says_why(function, reason):
    plain, training = Training(), Training()
    step = training.one_program(lambda x, y: function(training, x, y))
    expected = run(plain, lambda x, y: function(plain, x, y))
    assert run(training, step) == expected
    assert reason in step.fallback_reason
    for mine, other in zip(training.tensors(), plain.tensors(), strict=True):
        assert torch.equal(mine, other)


def test_the_line_of_a_read_is_named():
    training = Training()
    step = training.one_program(lambda x, y: reads(training, x, y))
    step(*batches()[0])
    assert "if loss.item() > 1e9:" in step.fallback_reason


def test_an_error_of_the_step_is_its_own():
    training = Training()
    step = training.one_program(lambda x, y: training.step(x[:, :3], y))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(*batches()[0])
