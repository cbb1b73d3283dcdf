"""A step that is traced once gives the numbers of one that is traced each time."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from mshnet.training import backend as backends
from mshnet.training.backend import Backend
from tpuscope.engine import metrics
from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.compiled_step import CompiledStep


@pytest.fixture(scope="module")
def backend():
    return backends.make_backend("tpu")


class Training:
    """A small network with batch norm, and Adagrad."""

    def __init__(self, backend):
        torch.manual_seed(0)
        self.backend = backend
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3))
        self.optimizer = backend.prepare(
            self.model, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), None
        )
        self.traced = 0

    def state(self):
        sums = [v for slots in self.optimizer.state.values() for v in slots.values()]
        return [*self.model.parameters(), *self.model.buffers(), *sums]

    def step(self, images, total):
        self.traced += 1
        loss = self.model(images).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (total + loss.detach(),)

    def train(self, repeated, batches):
        """Losses summed up after each step, and all that is left."""
        total, seen = self.backend.to_device(torch.zeros(1)), []
        for images in batches:
            [total] = repeated(self.backend.to_device(images), total)
            seen.append(total.item())
        left = [*self.model.state_dict().values()]
        left += [v for slots in self.optimizer.state.values() for v in slots.values()]
        return seen, [value.cpu() for value in left]


def batches(count=4, size=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 1, size, size, generator=generator) for _ in range(count)]


def test_numbers_are_those_of_tracing_each_time(backend):
    usual, quick = Training(backend), Training(backend)
    expected = usual.train(Backend.compile_step(backend, usual.step, usual.state()), batches())
    replay = backend.compile_step(quick.step, quick.state())
    seen, left = quick.train(replay, batches())
    assert replay.fallback_reason is None
    assert (usual.traced, quick.traced) == (4, 2)
    assert seen == expected[0]
    for ours, theirs in zip(left, expected[1], strict=True):
        assert torch.equal(ours, theirs)  # weights, statistics, sums, and counts of steps


def test_a_slow_program_before_the_step_is_not_taken_for_a_part_of_it(backend):
    def step(x):
        runtime.wait()  # whatever runs still ends within the step
        return (x * 2,)

    slow = backend.to_device(torch.randn(1500, 1500))
    double = CompiledStep(step, [])
    for _ in range(3):
        for _ in range(20):
            slow = torch.tanh(slow @ slow)
        backend.sync()  # dispatched, and not waited for
        double(backend.to_device(torch.ones(3)))
    assert double.fallback_reason is None


def test_the_guide_s_example(backend):
    """As it stands in GUIDE.md, with a model that is not ours."""
    text = (Path(__file__).resolve().parents[2] / "GUIDE.md").read_text()
    [code] = [part for part in text.split("```") if "import CompiledStep" in part]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    images = torch.randn(2, 3, 6, 6)
    model(images)
    optimizer = backend.prepare(model, lambda m: torch.optim.Adagrad(m.parameters()), None)
    given = {"model": model, "optimizer": optimizer, "F": nn.functional}
    given["feed"] = [
        (backend.to_device(images), backend.to_device(torch.tensor([i, 1]))) for i in range(3)
    ]
    given["total"] = backend.to_device(torch.zeros(1))
    exec(code.removeprefix("python\n"), given)
    assert given["step"].fallback_reason is None
    assert given["total"].item() > 0
    assert {int(slots["step"]) for slots in optimizer.state.values()} == {3}


def test_one_program_for_each_shape(backend):
    training = Training(backend)
    replay = backend.compile_step(training.step, training.state())
    before = metrics.now().compilations
    training.train(replay, batches(3, 10) + batches(3, 12) + batches(2, 10))
    assert training.traced == 4  # twice for each
    assert metrics.now().compilations - before == 2


def test_what_was_changed_from_outside_is_seen(backend):
    training = Training(backend)
    replay = backend.compile_step(training.step, training.state())
    training.train(replay, batches(3))
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0)
    total, _ = training.train(replay, batches(1))
    assert total == [0]
    assert training.traced == 2


def test_a_result_that_is_an_argument_is_handed_through(backend):
    replay = CompiledStep(lambda x, y: (x * 2, y), [])
    for value in (1.0, 2.0, 3.0):
        x, y = (backend.to_device(torch.full((3,), v)) for v in (value, 7.0))
        double, same = replay(x, y)
        assert double.tolist() == [2 * value] * 3
        assert same is y
    assert replay.fallback_reason is None


# --- what cannot be repeated is traced each time, with the same numbers --------------------------


def refused(step, state=()):
    """A step's results, three times, and why it is not repeated."""
    replay = CompiledStep(step, state)
    device = runtime.device()
    found = [replay(torch.full((2,), float(i)).to(device))[0].tolist() for i in range(3)]
    return found, replay.fallback_reason


def test_a_step_that_reads_a_value(backend):
    def step(x):
        return (x + x.sum().item(),)

    found, why = refused(step)
    assert found == [[0, 0], [3, 3], [6, 6]]
    assert "a value was read" in why


def test_a_step_that_reads_something_unknown(backend):
    hidden = backend.to_device(torch.ones(2))

    def step(x):
        return (x + hidden,)

    found, why = refused(step)
    assert found == [[1, 1], [2, 2], [3, 3]]
    assert why == "the step reads 1 tensor of shape (2,), neither state nor arguments"


def test_a_step_that_keeps_something(backend):
    kept = []

    def step(x):
        kept.append(x * 5)
        return (x * 2,)

    found, why = refused(step)
    assert found == [[0, 0], [2, 2], [4, 4]]
    assert why == "the step leaves 1 tensor of shape (2,), neither state nor results"
    assert kept[2].tolist() == [10, 10]


def test_a_step_whose_numbers_change(backend):
    """Adam corrects its first steps by numbers that it computes on the host."""
    weight = backend.to_device(torch.ones(3))
    optimizer = torch.optim.Adam([weight.requires_grad_()], lr=0.1)
    optimizer.state[weight] = {
        "step": torch.tensor(0.0),
        "exp_avg": backend.to_device(torch.zeros(3)),
        "exp_avg_sq": backend.to_device(torch.zeros(3)),
    }

    def step(x):
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (weight.detach() * 1,)

    slots = optimizer.state[weight]
    replay = CompiledStep(step, [weight, slots["exp_avg"], slots["exp_avg_sq"]], [slots["step"]])
    for number in range(1, 5):
        [left] = replay(backend.to_device(torch.ones(3)))
        # With a gradient that stays the same, every step is as long as the learning rate.
        assert left.tolist() == pytest.approx([1 - 0.1 * number] * 3, abs=1e-5)
    assert "the numbers of a step differ" in replay.fallback_reason


def test_other_devices_run_the_step_as_it_is():
    plain = Backend(torch.device("cpu"), "cpu")
    training = Training(plain)
    expected = copy.deepcopy(training.model)
    run = plain.compile_step(training.step, training.state())
    total, _ = training.train(run, batches(2))
    assert training.traced == 2
    assert total[0] == pytest.approx(expected(batches(1)[0]).square().mean().item(), rel=1e-5)
