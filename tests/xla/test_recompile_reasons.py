"""Which Python numbers torch_xla passes beside the program, and which become a part of it."""

import pytest
import torch
import torch.nn.functional as F
import torch_xla

from tpuscope.engine import torch_xla as runtime
from tpuscope.monitor import recompile_reasons
from tpuscope.monitor.watch import watch

AS_DATA = {
    "add": lambda x, v: x + v,
    "sub": lambda x, v: x - v,
    "rsub": lambda x, v: v - x,
    "mul": lambda x, v: x * v,
    "div": lambda x, v: x / v,
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "addcdiv": lambda x, v: torch.addcdiv(x, x, x, value=v),
    "lerp": lambda x, v: torch.lerp(x, x + 1, v),
}
IN_THE_GRAPH = {
    "pow": lambda x, v: x**v,
    "norm": lambda x, v: x.norm(v),
    "threshold": lambda x, v: F.threshold(x, v, v),
    "layer_norm": lambda x, v: F.layer_norm(x, (3,), eps=v),
}
VALUES = (0.25, 0.5, 0.75)


def compilations(x, function):
    counts = []
    for value in VALUES:
        before = runtime.counters()
        result = function(x, value)
        torch_xla.sync()
        counts.append((runtime.counters() - before).compilations)
        del result
    return counts


@pytest.fixture
def x(xla):
    value = torch.rand(5, 3).to(xla.device)
    torch_xla.sync()
    return value


def test_the_numbers_of_arithmetic_are_data(x):
    counts = {name: compilations(x, function) for name, function in AS_DATA.items()}
    assert all(later == [0, 0] for _, *later in counts.values()), counts
    assert set(AS_DATA) == recompile_reasons._ARITHMETIC


@pytest.mark.parametrize("name", IN_THE_GRAPH)
def test_a_number_in_the_graph_is_named_as_the_cause_at_each_value(x, name):
    with watch() as w:
        assert compilations(x, IN_THE_GRAPH[name]) == [1, 1, 1]
    first, *others = (compiled.cause for compiled in w.report().compiled)
    assert first.kind == recompile_reasons.FIRST
    assert [(cause.kind, cause.old, cause.new) for cause in others] == [
        (recompile_reasons.NUMBER, "0.25", "0.5"),
        (recompile_reasons.NUMBER, "0.5", "0.75"),
    ]
    assert all(name in cause.what for cause in others)


def test_numbers_that_have_changed_without_harm_are_not_blamed(x):
    with watch() as w:
        for weight, power in ((0.1, 2.5), (0.2, 2.5), (0.3, 3.5)):
            result = F.leaky_relu(x, weight) ** power
            torch_xla.sync()
            del result
    [_, cause] = [compiled.cause for compiled in w.report().compiled]
    assert (cause.what, cause.old, cause.new) == ("argument 1 of pow", "2.5", "3.5")


def test_an_evaluation_is_another_computation_and_nobodys_fault(xla):
    weight = torch.rand(2, 2).to(xla.device).requires_grad_()
    torch_xla.sync()
    with watch() as w:
        for training in (True, False, True, False):
            loss = (torch.ones(3, 2).to(xla.device) @ weight).sigmoid().sum()
            if training:
                loss.backward()
                weight.grad = None
            torch_xla.sync()
            del loss
    assert [compiled.cause.kind for compiled in w.report().compiled] == [
        recompile_reasons.FIRST
    ] * 2
    assert w.report().fine
