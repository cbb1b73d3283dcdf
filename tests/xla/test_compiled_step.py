"""A step that is traced once gives the numbers of one that is traced each time."""

import copy
import itertools
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
        self._calls = itertools.count()  # a plain number would be a value that the step changes

    @property
    def traced(self):
        return int(repr(self._calls)[6:-1])

    def state(self):
        sums = [v for slots in self.optimizer.state.values() for v in slots.values()]
        return [*self.model.parameters(), *self.model.buffers(), *sums]

    def step(self, images, total):
        next(self._calls)
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
    assert "`return (x + x.sum().item(),)`" in why


def test_a_step_that_reads_something_unknown(backend):
    hidden = backend.to_device(torch.ones(2))

    def step(x):
        return (x + hidden,)

    found, why = refused(step)
    assert found == [[1, 1], [2, 2], [3, 3]]
    assert "reads 1 tensor of shape (2,)" in why
    assert "`return (x + hidden,)`" in why  # the line


def test_a_step_that_keeps_something(backend):
    kept = []

    def step(x):
        kept.append(x * 5)
        return (x * 2,)

    found, why = refused(step)
    assert found == [[0, 0], [2, 2], [4, 4]]
    assert "leaves 1 tensor of shape (2,)" in why
    assert "`kept.append(x * 5)`" in why
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


class Trainer:
    """A training loop with everything that may change from step to step, repeated or traced."""

    def __init__(self, optimizer, schedule=None, accumulate=1, clip=0.0, average=0.0):
        torch.manual_seed(0)
        device = runtime.device()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
        self.model.to(device)
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = schedule and schedule(self.optimizer)
        self.clip, self.average, self.accumulate, self.update = clip, average, accumulate, True
        self.total = torch.zeros(1).to(device)
        self.mean = [p.detach().cpu().to(device) for p in self.model.parameters()] * bool(average)
        if accumulate > 1:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros(parameter.shape).to(device)

    def step(self, rows):
        loss = self.model(rows).square().mean() / self.accumulate
        loss.backward()
        if self.update:
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.accumulate == 1)
        for kept, value in zip(self.mean, self.model.parameters(), strict=False):
            kept.lerp_(value.detach(), 1 - self.average)
        return (loss.detach() + 0,)

    def state(self):
        tensors = [*self.model.parameters(), *self.mean]
        if self.accumulate > 1:
            tensors += [p.grad for p in self.model.parameters()]
        slots = [v for slots in self.optimizer.state.values() for v in slots.values()]
        return tensors + slots

    def train(self, steps, repeated):
        """Losses and all tensors that are left, bit for bit."""
        runtime.sync()
        runtime.set_rng_state(7)
        generator = torch.Generator().manual_seed(3)
        losses, run, traced = [], None, itertools.count()

        def step(rows):
            next(traced)
            return self.step(rows)

        for number in range(steps):
            rows = torch.randn(4, 6, generator=generator).to(runtime.device())
            self.update = (number + 1) % self.accumulate == 0
            if run is None and (self.optimizer.state or not isinstance(self.optimizer, STATEFUL)):
                state = self.state()
                on_host = [t for t in state if t.device.type == "cpu"]
                run = CompiledStep(step, [t for t in state if t.device.type == "xla"], on_host)
            if repeated and run:
                [loss] = run(rows)
            else:
                [loss] = step(rows)
                runtime.sync()
            losses.append(loss.item())
            if self.schedule:
                self.schedule.step()
        self.reason, self.traced = run.fallback_reason, next(traced)
        return losses, [tensor.cpu() for tensor in self.state()]


STATEFUL = (torch.optim.Adam, torch.optim.AdamW)  # they make their state in their first step


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def capturable(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, capturable=True)


def every_fifth_step(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 6))


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


class CycledBeta:
    """Four steps with each of three betas, again and again."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        beta = (0.95, 0.9, 0.85)[self.steps // 4 % 3]
        self.optimizer.param_groups[0]["betas"] = (beta, 0.99)


CASES = {
    "dropout": (sgd, {}, 14, 2),
    "scheduler": (sgd, {"schedule": every_fifth_step}, 15, 6),
    "warm-up": (sgd, {"schedule": warm_up}, 14, 8),
    "cycled beta": (capturable, {"schedule": CycledBeta}, 26, 7),
    "one cycle": (capturable, {"schedule": one_cycle}, 8, 8),
    "Adam's correction": (adamw, {}, 8, 8),
    "Adam on the device": (capturable, {}, 10, 3),
    "clipping": (sgd, {"clip": 0.1}, 10, 2),
    "average of weights": (sgd, {"average": 0.9}, 10, 2),
    "accumulation": (sgd, {"accumulate": 2}, 14, 4),
    "everything": (
        capturable,
        {"schedule": CycledBeta, "clip": 0.1, "average": 0.9, "accumulate": 2},
        30,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_step_gives_the_bits_of_a_traced_one(case):
    optimizer, settings, steps, traced = CASES[case]
    usual, quick = (Trainer(optimizer, **settings) for _ in range(2))
    expected, seen = usual.train(steps, repeated=False), quick.train(steps, repeated=True)
    assert len(set(expected[0])) == steps
    assert seen[0] == expected[0]
    for ours, theirs in zip(seen[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)
    assert quick.traced == (traced or quick.traced) <= steps


FACTOR = 2.0


class Scaled:
    """A step of an object, with values of every kind; one method that the step does not call."""

    def __init__(self):
        device = runtime.device()
        self.drop = nn.Dropout(0.0).to(device)
        self.weight = nn.Linear(3, 3, bias=False).to(device)
        self.numbers, self.by_name = [2.0], {"bias": 0.0}
        self.calls = 0

    @property
    def bias(self):
        return self.by_name["bias"]

    def helper(self, x):
        return x * self.numbers[0] + self.bias

    def step(self, x, scale=3.0):
        return (self.helper(self.drop(self.weight(x))).detach() * scale * FACTOR,)

    def use(self, run, x):
        self.calls += 1  # the step does not read it
        return run(x)


def set_global():
    globals()["FACTOR"] = 5.0


CHANGES = {
    "an entry of a list": lambda s: s.numbers.__setitem__(0, 4.0),
    "an entry of a dict": lambda s: s.by_name.update(bias=1.0),
    "another list": lambda s: setattr(s, "numbers", [7.0]),
    "a global": lambda s: set_global(),
    "a layer's number": lambda s: setattr(s.drop, "p", 1.0),
    "a module's mode": lambda s: (setattr(s.drop, "p", 1.0), s.drop.eval()),
    "a hook": lambda s: s.weight.register_forward_hook(lambda m, i, result: result * 2),
    "another layer": lambda s: setattr(s, "drop", nn.Tanh()),
    "a frozen weight": lambda s: s.weight.weight.requires_grad_(False),
    "a weight that is another tensor": lambda s: setattr(
        s.weight, "weight", nn.Parameter(s.weight.weight.detach() * 3)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_python_value_that_changes_between_calls_is_noticed(change, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    scaled = Scaled()
    run = CompiledStep(scaled.step, [*scaled.weight.parameters()])
    x = torch.ones(2, 3).to(runtime.device())
    for _ in range(3):
        scaled.use(run, x)
    [program] = next(iter(run._programs.values()))
    assert program.seen_twice and run.fallback_reason is None
    CHANGES[change](scaled)
    for _ in range(3):
        expected = scaled.step(x)[0].cpu()
        assert torch.equal(scaled.use(run, x)[0].cpu(), expected)


def test_a_value_that_changes_in_every_call_is_traced_and_named(backend):
    scale = 1.0

    def step(x):
        return (x * scale,)

    run = CompiledStep(step, [])
    x = backend.to_device(torch.ones(2))
    for number in range(6):
        scale = 0.5 + number
        assert run(x)[0].tolist() == [scale] * 2
    assert "scale: 4.5, then 5.5" in run.fallback_reason
    for _ in range(3):  # it has settled
        run(x)
    assert run.fallback_reason is None


def test_a_step_that_counts_for_itself_is_traced(backend):
    counter = {"calls": 0}

    def step(x):
        counter["calls"] += 1
        return (x * (2.0 if counter["calls"] % 4 == 0 else 3.0),)

    found, why = refused(step)
    assert found == [[0, 0], [3, 3], [6, 6]]
    assert "changes a Python value" in why and "calls" in why


def test_a_step_that_draws_on_the_host_is_traced(backend):
    torch.manual_seed(0)

    def step(x):
        return (x * (2.0 if torch.rand(()) < 2 else 3.0),)

    found, why = refused(step)
    assert found == [[0, 0], [2, 2], [4, 4]]
    assert "random numbers on the host" in why


def test_a_step_that_ends_itself_is_traced(backend):
    def step(x):
        y = x * 2
        runtime.sync()
        return (y,)

    found, why = refused(step)
    assert found == [[0, 0], [2, 2], [4, 4]]
    assert "torch_xla.sync()" in why


def test_a_value_that_was_computed_already_counts_as_a_read(backend):
    """Equal in the first two calls, so that the numbers of the calls do not tell."""
    run = CompiledStep(lambda x, factor: (x * factor.item(),), [])
    x = backend.to_device(torch.ones(2))
    for factor in (2.0, 2.0, 2.0, 5.0):
        given = backend.to_device(torch.tensor([factor]))
        backend.sync()
        assert run(x, given)[0].tolist() == [factor] * 2
    assert "a value was read" in run.fallback_reason


def test_one_tensor_given_twice_is_not_taken_for_two(backend):
    run = CompiledStep(lambda x, y: (x - y,), [])
    x, y = (backend.to_device(torch.full((2,), value)) for value in (5.0, 3.0))
    for first, second in ((x, x), (x, x), (x, x), (x, y), (y, x)):
        expected = (first.cpu() - second.cpu()).tolist()
        assert run(first, second)[0].tolist() == expected


def test_equal_results_are_each_returned(backend):
    def step(x):
        y = x * 2
        return y, x + 1, y

    run = CompiledStep(step, [])
    for number in range(4):
        results = run(backend.to_device(torch.full((2,), float(number))))
        assert [r.tolist()[0] for r in results] == [number * 2, number + 1, number * 2]
    assert run.fallback_reason is None


def test_what_is_random_and_pending_before_a_step_changes_none_of_its_numbers(backend):
    def losses(repeated):
        runtime.set_rng_state(11)
        drop, seen = nn.Dropout(0.5), []
        run = CompiledStep(lambda noise: (drop(noise + 2),), [])
        for _ in range(5):
            noise = torch.rand(6, device=runtime.device())
            if repeated:
                [result] = run(noise)
            else:
                result = drop(noise + 2)
                runtime.sync()
            seen.append(result.tolist())
        return seen

    assert losses(repeated=True) == losses(repeated=False)


def test_other_devices_run_the_step_as_it_is():
    plain = Backend(torch.device("cpu"), "cpu")
    training = Training(plain)
    expected = copy.deepcopy(training.model)
    run = plain.compile_step(training.step, training.state())
    total, _ = training.train(run, batches(2))
    assert training.traced == 2
    assert total[0] == pytest.approx(expected(batches(1)[0]).square().mean().item(), rel=1e-5)
