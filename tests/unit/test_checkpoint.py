"""Weights in every form, and files that are whole, damaged, foreign or hostile."""

import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from mshnet import MSHNet, RequestError, api
from mshnet.training import checkpoint
from tpuscope.files import remove_parts, write_part

NARROW = {"widths": (2, 2, 2, 2, 2), "depths": (1, 1, 1, 1, 1)}


@pytest.fixture
def state():
    torch.manual_seed(3)
    return MSHNet(**NARROW).state_dict()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "w.pkl"


def refusal(path):
    with pytest.raises(RequestError) as error:
        checkpoint.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return error.value.code


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
@pytest.mark.parametrize("archive", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_every_official_weight_form_loads(path, state, wrap, archive):
    torch.save(wrap(state), path, _use_new_zipfile_serialization=archive)
    model = MSHNet(**NARROW)
    assert checkpoint.load_weights(model, path) is True
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_weights_from_warm_up_record_which_head_is_trained(path, state):
    checkpoint.save({"state_dict": state, "full": False}, path)
    assert checkpoint.load_weights(MSHNet(**NARROW), path) is False


def change(name, value):
    """A change of one entry of a state_dict."""
    return lambda state: state | {name: value(state[name]) if callable(value) else value}


@pytest.mark.parametrize(
    ("changed", "code", "named"),
    [
        (change("final.weight", torch.zeros(1, 4, 5, 5)), "other-network", "(1, 4, 5, 5)"),
        (change("foreign", torch.zeros(1)), "other-network", "foreign"),
        (change("final.bias", torch.tensor([torch.nan])), "non-finite-weights", "final.bias"),
        (change("final.bias", torch.tensor([-torch.inf])), "non-finite-weights", "final.bias"),
        (change("final.bias", torch.tensor([1e300]).double()), "non-finite-weights", "final.bias"),
        (change("final.bias", lambda old: old.to("meta")), "non-finite-weights", "final.bias"),
        (change("final.weight", lambda old: old.to_sparse()), "non-finite-weights", "final.weight"),
    ],
    ids=["shape", "name", "NaN", "infinite", "infinite in float32", "meta", "sparse"],
)
def test_refused_weights_leave_the_model_as_it_was(path, state, changed, code, named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors: a beta state
        torch.save(changed(state), path)
        model = MSHNet(**NARROW)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(RequestError) as error:
            checkpoint.load_weights(model, path)
    assert (error.value.code, named in str(error.value)) == (code, True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("config", [3, {"widths": 5}, {"widths": (1, 2)}, {"base_size": "x"}])
@pytest.mark.parametrize("use", [api.test, lambda given: api.predict_files(given, [], Path("x"))])
def test_wrong_settings_in_a_weight_file_are_one_line(path, state, config, use):
    torch.save({"state_dict": state, "config": config}, path)
    with pytest.raises(RequestError) as error:
        use({"weight_path": str(path)})
    assert (error.value.code, str(path) in str(error.value)) == ("damaged-checkpoint", True)


# --- damaged files -------------------------------------------------------------------------------


def same(content, original):
    return content.keys() == original.keys() and all(
        torch.equal(content[key], original[key]) for key in original
    )


def outcome(path, original):
    """``refused``, ``same`` or ``other`` numbers; is_whole must agree and never raise."""
    whole = checkpoint.is_whole(path)
    try:
        content = checkpoint.load(path)
    except RequestError as error:
        assert error.code in ("damaged-file", "unsafe-file", "no-weights"), error
        return "refused"
    assert whole
    return "same" if same(content, original) else "other"


def test_a_flipped_bit_never_loads_as_other_numbers(path):
    """Flips everywhere: tensors, pickle, archive headers. Ours or the zip reader may refuse."""
    torch.manual_seed(0)
    original = {"a": torch.randn(100), "b": torch.randn(5, 3).double(), "c": torch.arange(4)}
    torch.save(original, path)
    whole = path.read_bytes()
    seen = {"refused": 0, "same": 0, "other": 0}
    for bit in random.Random(0).sample(range(8 * len(whole)), 1500):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        seen[outcome(path, original)] += 1
    assert seen["other"] == 0, seen
    assert seen["refused"] > 300, "the flips hit nothing"


def test_a_truncated_file_is_refused(path):
    original = {"a": torch.randn(100)}
    torch.save(original, path)
    whole = path.read_bytes()
    for length in {*random.Random(1).sample(range(len(whole)), 100), len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert not checkpoint.is_whole(path)
        assert refusal(path) in ("damaged-file", "unsafe-file")


@pytest.mark.parametrize(
    "content",
    [
        b"root:x:0:0:root:/root:/bin/bash\n",
        b"name,x,y\na,1,2\n",
        b"(lp0\nI1\na.",
        b"0",
        b"g",
        b"PK\x03\x04",
        b"\x80\x02.",
        b"\x00" * 1000,
        "Ünïcode\n".encode("latin-1"),
    ],
)
def test_foreign_text_is_refused(path, content):
    path.write_bytes(content)
    assert refusal(path) in ("damaged-file", "unsafe-file", "no-weights")
    assert not checkpoint.is_whole(path)


def test_foreign_bytes_are_refused(path):
    """Text and pickle opcodes at random: the old reader raised IndexError, struct.error, …"""
    chance = random.Random(0)
    alphabets = (bytes(range(256)), bytes(range(32, 127)), b"().]}0123456789abcdgijlpqrstuIFSVX\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(600):
            alphabet = alphabets[number % 3]
            path.write_bytes(bytes(chance.choices(alphabet, k=chance.randint(1, 60))))
            assert refusal(path) in ("damaged-file", "unsafe-file", "no-weights")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: path.mkdir(), "is-a-folder"),
        (lambda path: None, "missing-file"),
        (lambda path: path.write_bytes(b""), "damaged-file"),
        (os.mkfifo, "not-a-file"),
        (lambda path: torch.save([1, 2], path), "no-weights"),
    ],
    ids=["folder", "missing", "empty", "fifo", "list"],
)
def test_what_is_no_weight_file_is_refused(path, make, code):
    make(path)
    assert refusal(path) == code
    assert checkpoint.is_whole(path) is (code == "no-weights")


class Bomb:
    """What a hostile pickle does: runs a call of its choice while it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, path):
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, path)
    assert refusal(path) == "unsafe-file"
    assert not (tmp_path / "ran").exists()


# --- the newest ----------------------------------------------------------------------------------


def at(folder, name, epoch):
    checkpoint.save({"epoch": epoch, "a": torch.full((50,), float(epoch))}, folder / name)
    return folder / name


def test_the_previous_one_is_taken_if_the_newest_is_whole_but_cannot_be_loaded(tmp_path):
    before = at(tmp_path, checkpoint.PREVIOUS, 3)
    torch.save({"epoch": 4, "a": Bomb(tmp_path / "ran")}, tmp_path / checkpoint.CHECKPOINT)
    path, content, refused = checkpoint.newest([tmp_path])
    assert (path, content["epoch"]) == (before, 3)
    assert [(path.name, error.code) for path, error in refused] == [
        (checkpoint.CHECKPOINT, "unsafe-file")
    ]


@pytest.mark.parametrize("epoch", ["4", 4.0, None, True, -2, 10**99, [4]])
def test_a_position_that_is_none_is_passed_over(tmp_path, epoch):
    before = at(tmp_path, checkpoint.PREVIOUS, 3)
    torch.save({"epoch": epoch}, tmp_path / checkpoint.CHECKPOINT)
    path, _, refused = checkpoint.newest([tmp_path])
    assert (path, refused[0][1].code) == (before, "damaged-checkpoint")


def test_damage_anywhere_in_the_old_file_does_not_stop_a_save(tmp_path):
    """save_newest looks at the file that it replaces: no header of it may raise."""
    newest = at(tmp_path, checkpoint.CHECKPOINT, 1)
    before = at(tmp_path, checkpoint.PREVIOUS, 0).read_bytes()
    whole = newest.read_bytes()
    headers = whole.rindex(b"PK\x01\x02", 0, whole.index(b"PK\x01\x02") + 4)
    for place in range(headers, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        newest.write_bytes(damaged)
        checkpoint.is_whole(newest)
    damaged = bytearray(whole)
    damaged[headers + 9] ^= 0x08  # "the name is UTF-8"
    damaged[headers + 46] = 0xFF  # and is not
    newest.write_bytes(damaged)
    checkpoint.save_newest({"epoch": 2}, tmp_path)
    assert checkpoint.load(newest)["epoch"] == 2
    assert (tmp_path / checkpoint.PREVIOUS).read_bytes() == before


# --- writing -------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, path, monkeypatch):
    checkpoint.save({"a": torch.ones(1)}, path)

    def fail(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save({"a": torch.zeros(1)}, path)
    assert checkpoint.load(path)["a"].item() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["w.pkl"]


def test_only_leftovers_of_the_named_files_are_removed(tmp_path):
    foreign = [".notes.part", ".weight.pkl.part", ".other.pkl.12.part", ".weight.pkl.x.part"]
    for name in (*foreign, ".weight.pkl.123.part", ".config.json.9.part"):
        Path(tmp_path, name).write_text("")
    write_part(tmp_path / "weight.pkl", lambda file: file.write(b"half"))
    remove_parts(tmp_path, ["weight.pkl", "config.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(foreign)
