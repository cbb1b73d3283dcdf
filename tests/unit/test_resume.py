"""Which checkpoint a run continues from, and with which settings."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from mshnet import RequestError
from mshnet.training import checkpoint, resume
from mshnet.training.config import Config
from tpuscope import drives


def put(folder, name, epoch, step=0, **settings):
    """A checkpoint with nothing in it but its position and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Config(**{"epochs": 50, "workers": 0} | settings).as_dict()
    content = {"net": {}, "optimizer": {}, "best": {"iou": 0.1}, "epoch": epoch, "config": config}
    checkpoint.save(content | {"step": step}, folder / name)
    checkpoint.save({"state_dict": {"a": torch.zeros(1)}}, folder / "weight.pkl")


def settings(given, where):
    said = []
    config, path, state = resume.settings(given, where, said.append)
    return config, path, state, "\n".join(said)


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_the_newest_by_position_is_taken(tmp_path):
    run = tmp_path / "run"
    put(run, "checkpoint.previous.pkl", epoch=6, step=7)
    put(run, "checkpoint.pkl", epoch=6, step=12)
    _, path, state, _ = settings({}, str(run))
    assert path == run / "checkpoint.pkl"
    assert checkpoint.position(state) == (7, 12)


def test_a_damaged_one_is_said_and_the_one_before_taken(tmp_path):
    run = tmp_path / "run"
    put(run, "checkpoint.previous.pkl", epoch=3)
    put(run, "checkpoint.pkl", epoch=4)
    cut(run / "checkpoint.pkl")
    _, path, _, said = settings({}, str(run))
    assert path == run / "checkpoint.previous.pkl"
    assert said == f"{run / 'checkpoint.pkl'} is damaged or incomplete, and is passed over"


def test_between_the_two_renames_only_the_previous_one_is_there(tmp_path):
    put(tmp_path / "run", "checkpoint.previous.pkl", epoch=3)
    assert settings({}, str(tmp_path / "run"))[1].name == "checkpoint.previous.pkl"
    assert settings({"save_dir": str(tmp_path / "run")}, "auto")[1] is not None


@pytest.mark.parametrize(("here", "there"), [(4, 9), (9, 4)])
def test_of_run_and_backup_the_one_furthest_is_taken(tmp_path, here, there):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=here, backup=str(drive))
    put(drive, "checkpoint.pkl", epoch=there)
    _, path, _, _ = settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert path.parent == (run if here > there else drive)


def test_the_backup_that_a_run_had_is_asked_too(tmp_path):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=4, backup=str(drive))
    put(drive, "checkpoint.pkl", epoch=5)
    config, path, _, _ = settings({}, str(run))
    assert path.parent == drive
    assert config.backup == str(drive)
    assert config.save_dir == str(run)


def test_a_new_machine_gets_the_files_of_the_backup(tmp_path):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(drive, "checkpoint.pkl", epoch=5)
    (drive / "metrics.jsonl").write_text('{"epoch": 0}\n')
    config, path, _, _ = settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert (config.save_dir, path) == (str(run), drive / "checkpoint.pkl")
    names = {"weight.pkl", "checkpoint.pkl", "metrics.jsonl"}
    assert {file.name for file in run.iterdir()} == names


def test_best_weights_come_from_where_the_checkpoint_comes(tmp_path):
    """Those of the run's own folder may be of an earlier session, on another host of a slice."""
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=1, backup=str(drive))
    put(drive, "checkpoint.pkl", epoch=5)
    checkpoint.save({"state_dict": {"a": torch.ones(1)}}, drive / "weight.pkl")
    settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert checkpoint.load(run / "weight.pkl")["state_dict"]["a"].item() == 1


def test_auto_begins_where_there_is_nothing(tmp_path):
    config, path, state, said = settings({"save_dir": str(tmp_path / "run")}, "auto")
    assert (path, state) == (None, None)
    assert config.save_dir == str(tmp_path / "run")
    assert said == f"--resume auto: no checkpoint in {tmp_path / 'run'} yet, a new run begins"


def test_a_checkpoint_file_is_taken_as_named(tmp_path):
    run = tmp_path / "run"
    put(run, "checkpoint.pkl", epoch=9)
    put(run, "checkpoint.previous.pkl", epoch=8)
    wanted = run / "checkpoint.previous.pkl"
    assert settings({}, str(wanted))[1] == wanted


@pytest.mark.parametrize("recorded", [None, "elsewhere"])
@pytest.mark.parametrize("further", ["run", "drive"])
def test_two_different_runs_are_not_mixed(tmp_path, recorded, further):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=9 if further == "run" else 2, backup=recorded)
    put(drive, "checkpoint.pkl", epoch=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pkl")}
    with pytest.raises(RequestError, match="hold different runs"):
        settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pkl")} == before


def test_a_refused_request_restores_nothing(tmp_path):
    put(tmp_path / "drive", "checkpoint.pkl", epoch=4, batch_size=16)
    given = {"save_dir": str(tmp_path / "run"), "backup": str(tmp_path / "drive")}
    with pytest.raises(RequestError, match="a resumed run keeps its own"):
        settings(given | {"batch_size": 32}, "auto")
    assert not (tmp_path / "run").exists()


# --- network drives ------------------------------------------------------------------------------


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """A folder that counts as a network drive; the working folder is elsewhere."""
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)

    def is_remote(path, mounts=None):
        return Path(path).resolve().is_relative_to(folder)

    monkeypatch.setattr(resume, "is_remote", is_remote)
    return folder


def test_a_save_dir_on_drive_becomes_the_backup_of_a_local_folder(drive):
    config, _, _, said = settings({"save_dir": str(drive / "first")}, None)
    assert config.backup == str(drive / "first")
    assert re.fullmatch("weight/first-[0-9a-f]{6}", config.save_dir)
    assert f"the run lives in {config.save_dir} and is copied there" in said
    other, *_ = settings({"save_dir": str(drive / "b" / "first")}, None)
    assert other.save_dir != config.save_dir, "a run of the same name elsewhere on Drive"


def test_the_same_line_goes_on_from_drive_on_a_new_machine(drive):
    put(drive / "first", "checkpoint.pkl", epoch=2)
    config, path, _, _ = settings({"save_dir": str(drive / "first")}, "auto")
    assert path == drive / "first" / "checkpoint.pkl"
    assert config.backup == str(drive / "first")
    assert re.fullmatch("weight/first-[0-9a-f]{6}", config.save_dir)
    assert Path(config.save_dir, "checkpoint.pkl").exists()


def test_a_run_on_drive_is_resumed_by_its_folder(drive):
    put(drive / "first", "checkpoint.pkl", epoch=2)
    config, path, _, _ = settings({}, str(drive / "first"))
    assert path == drive / "first" / "checkpoint.pkl"
    assert config.backup == str(drive / "first")
    assert re.fullmatch("weight/first-[0-9a-f]{6}", config.save_dir)


def test_two_backups_are_refused(drive):
    with pytest.raises(RequestError, match="leave --backup out, or name a local --save-dir"):
        settings({"save_dir": str(drive / "a"), "backup": "elsewhere"}, None)


def test_drive_that_is_not_mounted_is_refused_everywhere():
    assert not drives.is_remote(Path("/content/drive"), "overlay / overlay rw 0 0\n")
    for given, where in (
        ({"save_dir": "/content/drive/MyDrive/a"}, None),
        ({"backup": "/content/drive/MyDrive/a"}, None),
        ({}, "/content/drive/a"),
    ):
        with pytest.raises(RequestError, match=r"Drive is not mounted; first run .*drive\.mount"):
            settings(given, where)


# --- what cannot be resumed ----------------------------------------------------------------------


def test_nothing_whole_is_refused_with_the_way_out(tmp_path):
    run = tmp_path / "run"
    put(run, "checkpoint.pkl", epoch=4)
    cut(run / "checkpoint.pkl")
    for where in (str(run), "auto"):
        with pytest.raises(RequestError, match="is whole; start a new run in another folder"):
            settings({"save_dir": str(run)}, where)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"there is no .*checkpoint\.pkl; name the folder"):
        settings({}, str(tmp_path))


def test_auto_needs_a_place_to_look(tmp_path):
    with pytest.raises(RequestError, match="looks for a checkpoint in --save-dir and --backup"):
        settings({}, "auto")


def test_missing_best_weights_are_refused(tmp_path):
    put(tmp_path, "checkpoint.pkl", epoch=4)
    (tmp_path / "weight.pkl").unlink()
    with pytest.raises(RequestError, match=r"best weights, weight\.pkl, are not beside"):
        settings({}, str(tmp_path))


def test_a_backup_that_cannot_be_copied_is_refused(tmp_path):
    put(tmp_path / "drive", "checkpoint.pkl", epoch=4)
    (tmp_path / "file").write_text("in the way")
    given = {"save_dir": str(tmp_path / "file" / "run"), "backup": str(tmp_path / "drive")}
    with pytest.raises(RequestError, match="cannot be copied to"):
        settings(given, "auto")


def test_cores_strategy_and_limits_may_change_and_the_recipe_may_not(tmp_path):
    put(tmp_path, "checkpoint.pkl", epoch=4, num_cores=1, max_minutes=30, batch_size=16)
    given = {"num_cores": 8, "strategy": "launch", "max_minutes": 500, "save_minutes": 1}
    config = settings(given, str(tmp_path))[0]
    assert (config.num_cores, config.strategy, config.max_minutes) == (8, "launch", 500)
    assert settings({}, str(tmp_path))[0].max_minutes is None, "a limit is one session's"
    with pytest.raises(RequestError, match=r"--batch-size 32: a resumed run keeps its own \(16\)"):
        settings({"batch_size": 32}, str(tmp_path))


def test_a_run_that_was_moved_knows_its_new_place(tmp_path):
    put(tmp_path / "a", "checkpoint.pkl", epoch=4, save_dir=str(tmp_path / "a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert settings({}, str(tmp_path / "b"))[0].save_dir == str(tmp_path / "b")
