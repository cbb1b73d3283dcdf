"""Who asked for an operation: the same answer eager and traced, forward and backward."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tpuscope.engine import lazy_graph
from tpuscope.engine import torch_xla as runtime
from tpuscope.monitor import layers

if not runtime.installed():
    pytest.skip("torch_xla is not installed on this system", allow_module_level=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.sigmoid(self.conv2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 8, 2))

    def forward(self, x):
        return self.head(self.block(x))


IMAGES = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def training(device):
    """A whole step on a device."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images = IMAGES.to(device)

    def step():
        optimizer.zero_grad()
        loss = net(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.fixture(scope="module")
def reports(xla):
    return {name: layers.track(training(d)) for name, d in (("cpu", "cpu"), ("xla", xla.device))}


@pytest.mark.parametrize("place", ["cpu", "xla"])
def test_every_layer_that_runs_is_named_by_its_path(reports, place):
    names = {layer.name for layer in reports[place].layers}
    assert names == {
        "Net.block",
        "Net.block.conv1",
        "Net.block.bn1",
        "Net.block.conv2",
        "Net.head.0",
        "Net.head.1",
        "SGD",
        layers.OUTSIDE,
    }


@pytest.mark.parametrize("place", ["cpu", "xla"])
def test_gradients_are_counted_with_the_layer_that_they_belong_to(reports, place):
    by_name = {layer.name: layer for layer in reports[place].layers}
    for conv in ("Net.block.conv1", "Net.block.conv2"):
        found = by_name[conv].operations
        assert found["aten.convolution.default"] == 1
        assert found["aten.convolution_backward.default"] == 1
    assert by_name["Net.block.bn1"].operations["aten.native_batch_norm_backward.default"] == 1
    assert by_name["Net.block"].operations["aten.sigmoid_backward.default"] == 1
    assert by_name["Net.block"].operations["aten.threshold_backward.default"] == 1


@pytest.mark.parametrize("place", ["cpu", "xla"])
def test_nothing_is_lost_flops_are_pytorchs_and_parameters_the_models(reports, place):
    with FlopCounterMode(display=False) as counter:
        training("cpu")()
    total = reports[place].total()
    assert total.flops == counter.get_total_flops() > 0
    assert total.parameters == sum(p.numel() for p in Net().parameters())
    assert total.operations == sum(
        (layer.operations for layer in reports[place].layers), start=type(total.operations)()
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_at_every_depth_the_sum_is_the_whole(reports, depth):
    report = reports["xla"]
    groups = layers.LayerReport(report.at_depth(depth))
    assert groups.total() == report.total()
    assert max(group.name.count(".") for group in groups.layers) < depth


def test_results_have_their_shapes(reports):
    for report in reports.values():
        by_name = {layer.name: layer for layer in report.layers}
        assert by_name["Net.block.conv1"].result == "2x4x8x8 float32"
        assert by_name["Net.head.1"].result == "2x2 float32"


def test_hlo_is_counted_where_something_is_traced_and_only_there(reports):
    assert all(layer.instructions is None for layer in reports["cpu"].layers)
    traced = {layer.name: layer.instructions for layer in reports["xla"].layers}
    assert traced["Net.block.conv1"] >= 2  # forward and backward
    assert traced["SGD"] >= 6  # an update for each parameter
    assert "–" in reports["cpu"].table() and "–" not in reports["xla"].table(1).split("host")[0]


def test_what_runs_on_the_host_is_found_in_its_layer(xla):
    # Its backward pass has no lowering off TPU.
    net = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 1, 1)
    ).to(xla.device)
    report = layers.track(net, torch.ones(1, 1, 4, 4))
    on_host = {layer.name: dict(layer.on_host) for layer in report.layers if layer.on_host}
    assert on_host == {"Sequential.1": {"aten::upsample_bilinear2d_backward": 1}}
    assert "1× aten::upsample_bilinear2d_backward" in report.table()


def test_a_module_alone_gets_its_inputs_moved_and_its_gradients_computed():
    net = Net()
    forward = layers.track(net, IMAGES, backward=False).total()
    assert net.block.conv1.weight.grad is None
    both = layers.track(net, IMAGES).total()
    assert net.block.conv1.weight.grad is not None
    assert both.flops > forward.flops > 0


def test_two_models_of_a_kind_have_different_names():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    report = layers.track(lambda x: second(first(x)), torch.ones(1, 2))
    assert [layer.name for layer in report.layers] == ["Linear", "Linear#2"]


def test_a_report_is_plain_values(reports):
    values = reports["xla"].as_dict()
    assert values["Net.block.conv1"]["parameters"] == 112
    assert type(values["Net.block.conv1"]["operations"]) is dict


def test_no_hook_is_left_behind_also_after_an_error():
    def broken(x):
        raise ValueError("in the step")

    hooks = nn.modules.module._global_forward_pre_hooks
    with pytest.raises(ValueError, match="in the step"):
        layers.track(broken, torch.ones(1))
    assert not hooks


class Unlabelled(layers.LayerLabels):
    def label(self, tensor, layer):
        pass


def test_names_reach_the_hlo_and_do_not_change_the_program(xla):
    def outputs(labels):
        step = training(xla.device)
        with labels:
            loss = step()  # alive, or it would not wait to be computed
        found = labels.pending()
        assert len(found) > 16 and loss.dim() == 0  # the loss, 8 parameters and their gradients
        return lazy_graph.lower(found), lazy_graph.hlo(found)

    (labelled, text), (plain, _) = outputs(layers.LayerLabels()), outputs(Unlabelled())
    assert labelled.digest == plain.digest
    assert labelled.stablehlo != plain.stablehlo
    assert 'op_name="Net.block.conv2/aten__convolution_overrideable"' in text
    assert 'op_name="Net.block.conv2/grad/aten__convolution_backward_overrideable"' in text
    assert 'op_name="SGD/aten__add"' in text
