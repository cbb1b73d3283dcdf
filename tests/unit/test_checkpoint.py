"""Weights in every form, and files that are whole or not there."""

import pytest
import torch

from mshnet import MSHNet, RequestError
from mshnet.training import checkpoint

NARROW = {"widths": (2, 2, 2, 2, 2), "depths": (1, 1, 1, 1, 1)}


@pytest.fixture
def state():
    torch.manual_seed(3)
    return MSHNet(**NARROW).state_dict()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s},
        lambda s: {"net": s, "optimizer": {"state": {}}, "epoch": 7, "iou": 0.5},
        lambda s: {f"module.{key}": value for key, value in s.items()},
        lambda s: {"state_dict": {f"module.{key}": value for key, value in s.items()}},
    ],
    ids=["bare", "state_dict", "checkpoint", "DataParallel", "DataParallel in state_dict"],
)
def test_every_official_weight_form_loads(tmp_path, state, wrap):
    torch.save(wrap(state), tmp_path / "w.pkl")
    model = MSHNet(**NARROW)
    assert checkpoint.load_weights(model, tmp_path / "w.pkl") is True
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_weights_from_warm_up_say_which_head_is_trained(tmp_path, state):
    checkpoint.save({"state_dict": state, "full": False}, tmp_path / "w.pkl")
    assert checkpoint.load_weights(MSHNet(**NARROW), tmp_path / "w.pkl") is False


def test_a_refused_file_leaves_the_model_as_it_was(tmp_path, state):
    wrong = dict(state)
    wrong["final.weight"] = torch.zeros(1, 4, 5, 5)
    torch.save(wrong, tmp_path / "w.pkl")
    model = MSHNet(**NARROW)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RequestError, match=r"other widths: final.weight is \(1, 4, 5, 5\)"):
        checkpoint.load_weights(model, tmp_path / "w.pkl")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.01])
def test_a_truncated_file_is_refused(tmp_path, state, keep):
    path = tmp_path / "w.pkl"
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(RequestError, match=r"w\.pkl is damaged"):
        checkpoint.load(path)


class Bomb:
    """What a hostile pickle does: runs a call of its choice while it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path):
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, tmp_path / "w.pkl")
    with pytest.raises(RequestError, match="could run code"):
        checkpoint.load(tmp_path / "w.pkl")
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "w.pkl"
    checkpoint.save({"a": torch.ones(1)}, path)

    def fail(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save({"a": torch.zeros(1)}, path)
    assert checkpoint.load(path)["a"].item() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["w.pkl"]
