"""The detector and other models on TorchTPU: one program a step, the CPU's numbers."""

import json

import pytest
import torch
from torch import nn

from mshnet import RequestError, api
from mshnet.loss import SLSIoULoss
from mshnet.model import MSHNet
from mshnet.training import checkpoint
from mshnet.training.backend import CpuBackend, TorchTpuBackend
from mshnet.training.devices import resolve_device
from mshnet.training.step import Normalize, summed_step
from tpuscope.engine import torch_tpu
from tpuscope.engine.fx_step import FxStep

NARROW = {"widths": (2, 4, 4, 8, 8), "depths": (1, 1, 1, 1, 1)}
STEPS = 3


def trained(backend, one_program):
    """Losses of a few steps, running statistics after the first, and compilations by step."""
    torch.manual_seed(0)
    model = MSHNet(**NARROW)
    model.fold = 1
    optimizer = backend.prepare(
        model.train(), lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05), None
    )
    normalize = Normalize()
    backend.move(normalize)
    parts = model, normalize, SLSIoULoss(), optimizer, backend
    step, state = summed_step(*parts, 0, 1)
    if one_program:
        step = backend.compile_step(step, state, [optimizer])
    generator = torch.Generator().manual_seed(1)
    total = backend.to_device(torch.zeros(1))
    losses, compiled, statistics = [], [], {}
    for _ in range(STEPS):
        images = torch.randint(0, 255, (4, 1, 32, 32), dtype=torch.uint8, generator=generator)
        masks = (torch.rand(4, 1, 4, 32, generator=generator) < 0.02).to(torch.uint8)
        before = backend.counters().compilations
        [total] = step(backend.to_device(images), backend.to_device(masks), total)
        losses.append(total.item())
        compiled.append(backend.counters().compilations - before)
        if not statistics:
            statistics = {
                k: v.cpu().clone() for k, v in model.state_dict().items() if "running" in k
            }
    if one_program:
        assert getattr(step, "fallback_reason", None) is None
    return losses, statistics, compiled


@pytest.fixture(scope="module")
def on_cpu():
    return trained(CpuBackend(), one_program=False)


@pytest.mark.parametrize("one_program", [False, True], ids=["eager", "one program"])
def test_the_detector_computes_what_the_cpu_computes(on_cpu, one_program):
    losses, statistics, compiled = trained(TorchTpuBackend(), one_program)
    assert losses[0] == pytest.approx(on_cpu[0][0], abs=1e-5)
    assert losses == pytest.approx(on_cpu[0], rel=2e-2)  # Adagrad's first steps enlarge rounding
    for name, value in on_cpu[1].items():
        torch.testing.assert_close(statistics[name], value, rtol=1e-5, atol=1e-6)
    if one_program:
        assert compiled[0] <= 3  # the step, and uploads
        assert compiled[1:] == [0] * (STEPS - 1)
    else:
        assert compiled[0] > 20  # a program for each kind of operation


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.5))


def test_batch_norm_of_pytorch_keeps_its_statistics_in_one_program_only():
    assert torch_tpu.loses_batch_norm_statistics()
    with pytest.raises(RequestError, match="does not update the running statistics"):
        torch_tpu.require_batch_norm(layers())
    torch_tpu.require_batch_norm(nn.Linear(2, 2))
    x = torch.randn(16, 4)
    plain, moved = layers()[:2], layers()[:2].to("tpu")
    plain(x)

    def step(x):
        return (moved(x).detach(),)

    count = moved[1].num_batches_tracked
    FxStep(step, [*moved.parameters(), moved[1].running_mean, moved[1].running_var, count])(
        x.to("tpu")
    )
    torch.testing.assert_close(moved[1].running_mean.cpu(), plain[1].running_mean)
    torch.testing.assert_close(moved[1].running_var.cpu(), plain[1].running_var)
    assert count.item() == 1


def test_dropout_is_new_in_every_call_and_follows_from_the_seed():
    dropout = nn.Dropout(0.5)
    step = FxStep(lambda x: (dropout(x),), [])
    ones = torch.ones(64, device="tpu")

    def masks(seed):
        torch_tpu.seed(seed)
        return [step(ones)[0].cpu() for _ in range(3)]

    first = masks(3)
    assert step.fallback_reason is None
    assert step.compilations == 1
    assert not torch.equal(first[1], first[2])
    assert all(torch.equal(a, b) for a, b in zip(first, masks(3), strict=True))
    assert not torch.equal(first[0], masks(4)[0])


def test_a_run_stopped_and_resumed_is_the_uninterrupted_one_and_goes_on_elsewhere(tmp_path):
    small = NARROW | {
        "base_size": 32, "crop_size": 32, "batch_size": 40, "workers": 0, "warm_epoch": 9,
        "device": "tpu", "epochs": 2,
    }  # fmt: skip
    silent = lambda text: None  # noqa: E731
    whole = api.train(small | {"save_dir": str(tmp_path / "whole")}, log=silent)
    part = str(tmp_path / "part")
    api.train(small | {"save_dir": part, "epochs": 1}, log=silent)
    api.train({"epochs": 2}, part, log=silent)
    logs = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "part")
    ]
    # `weights` is a hash of all weights: the runs agree to the bit.
    assert [line["weights"] for line in logs[0]] == [line["weights"] for line in logs[1]]
    assert whole["compilations"] is not None
    on_cpu = api.train({"epochs": 3, "device": "cpu"}, part, log=silent)
    state = checkpoint.load(tmp_path / "part" / checkpoint.CHECKPOINT)
    assert state["epoch"] == 2
    assert on_cpu["stopped"] is None


def test_what_it_cannot_do_is_one_line(monkeypatch):
    assert resolve_device("tpu") == "torch_tpu:CPU"
    with pytest.raises(RequestError, match="use --num-cores 1"):
        resolve_device("tpu", 8)
    with pytest.raises(RequestError, match="--engine torch_tpu --device cpu"):
        resolve_device("cpu", engine="torch_tpu")
    with pytest.raises(RequestError, match="torch_xla is not installed"):
        resolve_device("tpu", engine="torch_xla")
    monkeypatch.delenv("PJRT_DEVICE")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(RequestError, match="this machine has no TPU"):
        resolve_device("tpu")
