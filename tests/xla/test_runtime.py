"""The runtime's counters, its feed, and the gate before it."""

import importlib.metadata
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mshnet import RequestError
from mshnet.training import backend as backends
from mshnet.training.config import Config
from tpuscope import versions
from tpuscope.engine import _private
from tpuscope.engine import torch_xla as runtime


def test_counters_count_compilations_fallbacks_and_reads(xla):
    x = xla.to_device(torch.arange(6.0).reshape(1, 6))
    before = runtime.counters()
    y = (x * 3).sum()
    runtime.sync()
    assert (runtime.counters() - before).compilations == 1
    y.item()
    torch.linalg.eigvals(xla.to_device(torch.eye(3)))  # no XLA lowering: runs on the host
    counted = runtime.counters() - before
    assert counted.host_reads == 1
    assert counted.fallbacks >= 1


class Noisy:
    """A model with Dropout in training, resumable."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.model.to(runtime.device())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rows = torch.ones(2, 4).to(runtime.device())
        runtime.sync()

    def losses(self, steps):
        found = []
        for _ in range(steps):
            loss = self.model(self.rows).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            runtime.sync()
            found.append(loss.item())
        return found


def test_training_with_dropout_resumes_exactly_when_the_seed_is_restored_last(xla):
    before = Noisy()
    before.losses(2)
    weights = {name: value.cpu() for name, value in before.model.state_dict().items()}
    seed = runtime.rng_state()
    expected = before.losses(3)

    def resumed(restore):
        after = Noisy()
        after.model.load_state_dict(weights)
        restore()
        return after.losses(3)

    def too_early():
        runtime.set_rng_state(seed)
        runtime.sync()  # of nothing but the weights, and yet it advances the seed

    def last():
        runtime.sync()
        runtime.set_rng_state(seed)

    assert resumed(last) == expected
    assert resumed(too_early) != expected


def test_another_torch_xla_is_refused_in_one_line():
    names = dict.fromkeys(_private.NAMES)
    _private.check(SimpleNamespace(**names))
    del names["_run_cached_graph"]
    with pytest.raises(runtime.XlaUnavailable) as error:
        _private.check(SimpleNamespace(**names))
    message = str(error.value)
    assert "_run_cached_graph" in message and versions.TORCH_XLA in message
    assert len(message.splitlines()) == 1


def test_private_names_of_torch_xla_are_used_in_one_module_only():
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("tpuscope", "mshnet", "labs", "benchmarks", "course")]
    users = {
        str(path.relative_to(root))
        for folder in folders
        for path in folder.rglob("*.py")
        if re.search(r"\._XLAC\b|torch_xla\._internal\b", path.read_text())
    }
    # The probe is a script of its own: it also runs where the package cannot be imported.
    assert users == {"tpuscope/engine/_private.py", "tpuscope/doctor/probe.py"}
    text = (root / "tpuscope/engine/_private.py").read_text()
    used = set(re.findall(r"(?:_xla\(\)|xla|extension)\.(_\w+)", text)) | {"_xla_step_marker"}
    assert used - {"_XLAC", "_internal"} == set(_private.NAMES), (
        "checked and used are the same names"
    )


class Numbers(Dataset):
    def __init__(self, broken_at=None):
        self.broken_at = broken_at

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == self.broken_at:
            raise RequestError("image 4 is damaged")
        return torch.tensor([index])


def test_the_feed_gives_every_batch_on_the_device_in_order(xla):
    feed = runtime.DeviceLoader(DataLoader(Numbers(), batch_size=2), xla.device)
    batches = list(feed)
    assert len(feed) == 3
    assert all(batch.device == xla.device for batch in batches)
    assert torch.cat([batch.cpu() for batch in batches]).flatten().tolist() == list(range(6))


def test_a_failing_loader_fails_the_epoch_instead_of_ending_it(xla):
    # torch_xla's own loader ends the loop as if the epoch were over.
    feed = runtime.DeviceLoader(DataLoader(Numbers(broken_at=4), batch_size=2), xla.device)
    with pytest.raises(RequestError, match="image 4 is damaged"):
        list(feed)


def test_an_epoch_that_is_left_early_leaves_no_threads(xla):
    before = threading.active_count()
    batches = iter(runtime.DeviceLoader(DataLoader(Numbers(), batch_size=1), xla.device))
    next(batches)
    assert threading.active_count() > before, "the upload goes on beside the step"
    batches.close()
    assert threading.active_count() == before


def test_versions_that_do_not_belong_together_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.1")
    with pytest.raises(RequestError, match=r"torch 2.9.0.* and torch_xla 2.8.1 do not belong"):
        backends.make_backend("tpu")


def test_scalars_may_not_be_put_on_the_device(xla):
    with pytest.raises(AssertionError, match="constant of the graph"):
        xla.to_device(torch.tensor(0.0))


@pytest.mark.parametrize("variable", backends.TPU_FLAGS)
def test_a_tpu_gets_its_flags_beside_the_users(monkeypatch, variable):
    ours = backends.TPU_FLAGS[variable]
    other = ours.partition("=")[0] + "=otherwise"
    for before, after in (
        ("", ours),
        ("--xla_dump_to=there", f"--xla_dump_to=there {ours}"),
        (other, other),
    ):
        for name in backends.TPU_FLAGS:
            monkeypatch.setenv(name, before)
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        runtime.select_platform("CPU", tpu_flags=backends.TPU_FLAGS)
        assert os.environ[variable] == before
        runtime.select_platform("TPU", tpu_flags=backends.TPU_FLAGS)
        assert os.environ[variable] == after


@pytest.mark.parametrize(
    ("platform", "given", "batch_size", "columns"),
    [
        ("CPU", None, 4, 0),
        ("CPU", 8, 4, 8),
        ("TPU", None, 4, 8),
        ("TPU", None, 127, 8),
        ("TPU", None, 128, 1),
        ("TPU", 0, 4, 0),
    ],
)
def test_the_network_computes_as_suits_the_device(
    xla, monkeypatch, platform, given, batch_size, columns
):
    monkeypatch.setenv("PJRT_DEVICE", platform)
    assert xla.default_fold(Config(space_to_depth=given, batch_size=batch_size)) == columns
    assert backends.Backend(torch.device("cpu"), "cpu").default_fold(
        Config(space_to_depth=given)
    ) == (given or 0)
