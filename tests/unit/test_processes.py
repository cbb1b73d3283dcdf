"""What torchrun's variables mean, and one process that communicates with nobody."""

import pytest
import torch

from mshnet.training import devices
from mshnet.training.config import Config
from tpuscope import torchrun
from tpuscope.engine.processes import ALONE, joined
from tpuscope.errors import RequestError

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def launched(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_the_place_of_a_process(launched):
    assert torchrun.launch() == torchrun.Launch(3, 4, 1, 2, 2, "127.0.0.1")


@pytest.mark.parametrize("name", torchrun.VARIABLES)
def test_without_one_of_the_variables_there_is_no_torchrun(launched, monkeypatch, name):
    monkeypatch.delenv(name)
    assert torchrun.launch() is None


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "4"), ("RANK", "one"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "-1")]
)
def test_variables_that_contradict_each_other_are_refused(launched, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=f"{name}={value}") as error:
        torchrun.launch()
    assert error.value.code == "torchrun-variables"


@pytest.mark.parametrize(
    ("device", "cores", "code"),
    [("cpu", 2, "cores"), ("tpu", 1, "torchrun-xla"), ("tpu", 8, "cores")],
)
def test_devices_that_torchrun_cannot_drive(launched, device, cores, code):
    with pytest.raises(RequestError) as error:
        devices.resolve_device(device, cores)
    assert error.value.code == code


def test_more_processes_than_gpus(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RequestError, match="use --nproc-per-node 1"):
        devices.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve_device("cuda") == "cuda"


def test_a_share_is_named_after_what_shares_it():
    with pytest.raises(RequestError, match="shared by 4 processes"):
        Config(batch_size=6).require_even_shares(4, "processes")


def test_one_process_alone():
    with joined() as group:
        assert group is ALONE
        assert (group.count, group.machines, group.is_main) == (1, 1, True)
        for act in (group.together, group.from_main, group.first_on_each_machine):
            assert act(lambda: 3) == 3
        values = torch.arange(3.0)
        assert group.gather(values).tolist() == [[0, 1, 2]]
        assert group.mean(values, values) == (values, values)
