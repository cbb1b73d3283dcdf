"""Which checkpoint a run continues from, and with which settings."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mshnet import RequestError, plots
from mshnet.training import checkpoint, resume, run_dir
from mshnet.training.config import Config
from tpuscope import drives


def state(epoch, step=0, **settings):
    """Content of a checkpoint, of a network with one weight."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    config = Config(**{"epochs": 50, "workers": 0} | settings).as_dict()
    return {
        "net": {"a": parameter.detach()},
        "optimizer": torch.optim.Adagrad([parameter], lr=0.05).state_dict(),
        "best": {"iou": 0.1, "epoch": 0, "phase": "full"},
        "epoch": epoch,
        "step": step,
        "config": config,
    }


def put(folder, name, epoch, step=0, **settings):
    """A checkpoint and best weights; by default of a run that lives in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"save_dir": str(folder)} | settings
    checkpoint.save(state(epoch, step, **settings), folder / name)
    checkpoint.save({"state_dict": {"a": torch.zeros(1)}}, folder / "weight.pkl")


def refusal(given, where):
    """Code and message of the refusal; nothing on the disk has changed."""
    with pytest.raises(RequestError) as error:
        settings(given, where)
    return error.value.code, str(error.value)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    put(drive, "checkpoint.pkl", epoch=there, save_dir=str(run))
    _, path, _, _ = settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert path.parent == (run if here > there else drive)


def test_the_backup_that_a_run_had_is_asked_too(tmp_path):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=4, backup=str(drive))
    put(drive, "checkpoint.pkl", epoch=5, save_dir=str(run), backup=str(drive))
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


def test_each_checkpoint_is_read_once(tmp_path, monkeypatch):
    run, drive = tmp_path / "run", tmp_path / "drive"
    for folder, epoch in ((run, 4), (drive, 9)):
        put(folder, "checkpoint.previous.pkl", epoch=epoch - 1, backup=str(drive))
        put(folder, "checkpoint.pkl", epoch=epoch, save_dir=str(run), backup=str(drive))
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kw: (read.append(1), load(*args, **kw))[1])
    for given, where in (
        ({"save_dir": str(run), "backup": str(drive)}, "auto"),
        ({}, str(run)),
        ({}, str(run / "checkpoint.pkl")),
    ):
        read.clear()
        put(run, "checkpoint.pkl", epoch=4, backup=str(drive))
        settings(given, where)
        assert len(read) == (1 if where.endswith("pkl") else 2)


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


# --- nothing of another run is replaced ---------------------------------------------------------


@pytest.mark.parametrize("recorded", [None, "elsewhere"])
@pytest.mark.parametrize("further", ["run", "drive"])
def test_two_different_runs_are_not_mixed(tmp_path, recorded, further):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(run, "checkpoint.pkl", epoch=9 if further == "run" else 2, backup=recorded)
    put(drive, "checkpoint.pkl", epoch=4)
    before = contents(tmp_path)
    for where in ("auto", str(run), str(run / "checkpoint.pkl")):
        given = {"save_dir": str(run), "backup": str(drive)}
        code, message = refusal(given, where)
        assert (code, str(drive) in message) == ("different-runs", True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoint.pkl", "checkpoint.previous.pkl"])
def test_a_new_run_does_not_replace_another_runs_backup(tmp_path, name):
    put(tmp_path / "drive", name, epoch=4)
    before = contents(tmp_path)
    given = {"save_dir": str(tmp_path / "new"), "backup": str(tmp_path / "drive")}
    code, message = refusal(given, None)
    assert code == "earlier-run"
    assert f"--backup {tmp_path / 'drive'}" in message
    assert "--resume auto" in message and "another folder" in message
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", run_dir.FILES[2:])
@pytest.mark.parametrize("where", [None, "auto"])
def test_foreign_files_in_the_backup_are_not_replaced(tmp_path, name, where):
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / name).write_text("somebody's")
    given = {"save_dir": str(tmp_path / "new"), "backup": str(tmp_path / "drive")}
    code, message = refusal(given, where)
    assert (code, str(tmp_path / "drive" / name) in message) == ("foreign-file", True)


def begun(folder, lines, **recorded):
    """What a run leaves that is killed before its first checkpoint."""
    folder.mkdir()
    run_dir.write_config(folder, Config(workers=0, **recorded))
    run_dir.rewrite_log(folder, [{"epoch": n, "loss": 1.0} for n in range(lines)])


@pytest.mark.parametrize(
    ("lines", "where", "code"),
    [(0, None, None), (0, "auto", None), (1, "auto", None), (1, None, 0), (2, "auto", 0)],
)
def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, lines, where, code):
    run, drive = tmp_path / "run", tmp_path / "drive"
    for folder in (run, drive):
        begun(folder, lines, save_dir=str(run), backup=str(drive))
    given = {"save_dir": str(run), "backup": str(drive)}
    if code is None:
        assert settings(given, where)[1] is None
        run_dir.claim(run, 0, resuming=False, auto=where == "auto")
        run_dir.release(run, created=False)
    else:
        assert refusal(given, where)[0] == "foreign-file"
        with pytest.raises(RequestError):
            run_dir.claim(run, 0, resuming=False, auto=where == "auto")


def test_the_config_of_another_program_is_no_begun_run(tmp_path):
    (tmp_path / "config.json").write_text('{"save_dir": "/elsewhere", "epochs": 3}')
    with pytest.raises(RequestError) as error:
        run_dir.claim(tmp_path, 0, resuming=False, auto=True)
    assert error.value.code == "foreign-file"


@pytest.mark.parametrize("name", ["weight.pkl", "config.json", "metrics.jsonl"])
def test_a_backup_is_not_restored_over_foreign_files(tmp_path, name):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(drive, "checkpoint.pkl", epoch=4)
    run.mkdir()
    (run / name).write_text("somebody's")
    before = contents(tmp_path)
    code, message = refusal({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert (code, str(run / name) in message) == ("foreign-file", True)
    assert contents(tmp_path) == before


def test_an_interrupted_restore_goes_on(tmp_path):
    run, drive = tmp_path / "run", tmp_path / "drive"
    put(drive, "checkpoint.pkl", epoch=4, save_dir="/gone", backup=str(drive))
    begun(run, lines=5, save_dir="/gone", backup=str(drive))  # without checkpoint.pkl so far
    _, path, _, _ = settings({"save_dir": str(run), "backup": str(drive)}, "auto")
    assert path.parent == drive
    assert (run / "checkpoint.pkl").exists()


def test_a_refused_request_restores_nothing(tmp_path):
    put(tmp_path / "drive", "checkpoint.pkl", epoch=4, batch_size=16)
    given = {"save_dir": str(tmp_path / "run"), "backup": str(tmp_path / "drive")}
    code, message = refusal(given | {"batch_size": 32}, "auto")
    assert (code, "--batch-size 32" in message) == ("fixed-setting", True)
    assert not (tmp_path / "run").exists()


# --- a checkpoint from elsewhere ----------------------------------------------------------------


def test_a_checkpoint_from_elsewhere_chooses_no_folder(tmp_path):
    run, victim = tmp_path / "downloaded", tmp_path / "victim"
    recorded = {"save_dir": "/their/run", "backup": str(victim), "compile_cache": str(victim)}
    put(run, "checkpoint.pkl", epoch=4, **recorded)
    config, _, _, said = settings({}, str(run))
    assert (config.backup, config.compile_cache) == (None, None)
    assert "its --backup and --compile-cache is ignored" in said
    own = {"backup": str(tmp_path / "mine"), "compile_cache": str(tmp_path / "cache")}
    config, _, _, said = settings(own, str(run))
    assert own == {"backup": config.backup, "compile_cache": config.compile_cache}
    assert said == ""
    for where in (str(run), str(run / "checkpoint.pkl")):
        put(run, "checkpoint.pkl", epoch=4, dataset_dir="/etc", **recorded)
        code, message = refusal({}, where)
        assert (code, "--dataset-dir" in message) == ("foreign-run", True)
    assert settings({"dataset_dir": "mine"}, str(run))[0].dataset_dir == "mine"


@pytest.mark.parametrize("known_by", ["save_dir", "backup"])
def test_an_own_run_keeps_its_folders(tmp_path, known_by):
    run, drive = tmp_path / "run", tmp_path / "drive"
    recorded = {"save_dir": "/gone", "backup": str(drive)} | {known_by: str(run)}
    put(run, "checkpoint.pkl", epoch=4, dataset_dir="/data", compile_cache="/cache", **recorded)
    config, _, _, said = settings({}, str(run))
    assert (config.dataset_dir, config.compile_cache) == ("/data", "/cache")
    assert config.backup == recorded["backup"] and said == ""


# --- wrong fields in a checkpoint ---------------------------------------------------------------

ADAGRAD = state(0)["optimizer"]
GROUP, SLOT = ADAGRAD["param_groups"][0], ADAGRAD["state"][0]
WRONG = {
    "epoch": ["x", 4.5, None, True, -7, 2**40, [1], torch.zeros(2)],
    "step": ["x", 1.5, None, -1, 2**40, torch.zeros(2)],
    "net": [3, [], {}, {"a": 1}, {1: torch.zeros(1)}],
    "best": [3, [], {}, {"iou": None}, {"iou": 0.1, "epoch": 0, "phase": 3},
             {"iou": "x", "epoch": 0, "phase": "full"}, {"iou": 0.1, "phase": "full"},
             {"iou": 0.1, "epoch": 0, "phase": "full", "a": torch.zeros(1)}],
    "optimizer": [
        3, {}, {"state": {}}, {"state": [], "param_groups": []}, {"state": {}, "param_groups": [3]},
        ADAGRAD | {"state": {}}, ADAGRAD | {"state": {0: 3}}, ADAGRAD | {"state": {"0": SLOT}},
        ADAGRAD | {"state": {0: SLOT | {"sum": torch.zeros(2)}}},
        ADAGRAD | {"state": {0: SLOT | {"sum": torch.tensor([torch.nan])}}},
        ADAGRAD | {"state": {0: SLOT | {"step": "3"}}},
        ADAGRAD | {"param_groups": [GROUP | {"params": [0, 1]}]},
        ADAGRAD | {"param_groups": [GROUP | {"params": ["0"]}]},
        ADAGRAD | {"param_groups": [GROUP | {"eps": "x"}]},
        ADAGRAD | {"param_groups": [{k: v for k, v in GROUP.items() if k != "lr_decay"}]},
    ],
    "loss_sum": [3, None, torch.zeros(3), torch.tensor([torch.inf])],
    "seconds": ["x", None, float("nan")],
    "replica_state": [3, torch.zeros(2), torch.zeros(2, 7), torch.zeros(0, 0)],
    "config": [3, None, {"epochs": "x"}, {"epochs": True}, {"widths": 5}, {"widths": (1, 2)},
               {"widths": (2, 2, 2, 2, 10**9)}, {"depths": "11111"}, {"lr": "x"}, {"lr": None},
               {"save_dir": 3}, {"dataset_dir": ["x"]}, {"backup": "a\0b"}, {"stage": 1},
               {"batch_size": 0}, {"device": None}, {"space_to_depth": 1.5}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(k, v, id=f"{k}-{n}") for k, vs in WRONG.items() for n, v in enumerate(vs)],
)
def test_a_wrong_field_is_one_line(tmp_path, field, value):
    put(tmp_path, "checkpoint.pkl", epoch=4)
    path = tmp_path / "checkpoint.pkl"
    content = checkpoint.load(path)
    if field == "config" and isinstance(value, dict):
        value = content["config"] | value
    torch.save(content | {field: value}, path)
    for where in (str(path), str(tmp_path)):
        code, message = refusal({}, where)
        assert code in ("damaged-checkpoint", "no-weights", "nothing-whole")
        assert "is damaged" in message or "no weights" in message
        assert len(message) < 600 and "\n" not in message


def test_a_checkpoint_with_a_wrong_field_is_passed_over(tmp_path):
    put(tmp_path, "checkpoint.previous.pkl", epoch=3)
    put(tmp_path, "checkpoint.pkl", epoch=4)
    content = checkpoint.load(tmp_path / "checkpoint.pkl")
    torch.save(content | {"optimizer": 3}, tmp_path / "checkpoint.pkl")
    _, path, _, said = settings({}, str(tmp_path))
    assert path.name == "checkpoint.previous.pkl"
    assert f"{tmp_path / 'checkpoint.pkl'} is damaged" in said


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
    assert refusal({"save_dir": str(drive / "a"), "backup": "x"}, None)[0] == "two-backups"


def test_a_new_run_does_not_replace_one_on_drive(drive):
    put(drive / "first", "checkpoint.pkl", epoch=2)
    before = contents(drive)
    code, message = refusal({"save_dir": str(drive / "first")}, None)
    assert (code, f"--save-dir {drive / 'first'}" in message) == ("earlier-run", True)
    assert "--resume auto" in message and contents(drive) == before


def test_a_drive_that_does_not_answer_is_refused(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(Path, "lstat", broken)
    code, message = refusal({"backup": str(tmp_path)}, None)
    assert (code, "not connected" in message) == ("unreadable-folder", True)


def test_drive_that_is_not_mounted_is_refused_everywhere():
    assert not drives.is_remote(Path("/content/drive"), "overlay / overlay rw 0 0\n")
    for given, where in (
        ({"save_dir": "/content/drive/MyDrive/a"}, None),
        ({"backup": "/content/drive/MyDrive/a"}, None),
        ({}, "/content/drive/a"),
    ):
        code, message = refusal(given, where)
        assert (code, "drive.mount" in message) == ("not-mounted", True)


# --- what cannot be resumed ----------------------------------------------------------------------


def test_nothing_whole_is_refused_with_the_way_out(tmp_path):
    run = tmp_path / "run"
    put(run, "checkpoint.pkl", epoch=4)
    cut(run / "checkpoint.pkl")
    for where in (str(run), "auto"):
        assert refusal({"save_dir": str(run)}, where)[0] == "nothing-whole"


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert refusal({}, str(tmp_path))[0] == "missing-file"
    assert refusal({}, str(tmp_path / "nowhere"))[0] == "missing-file"


def test_auto_needs_a_place_to_look(tmp_path):
    assert refusal({}, "auto")[0] == "no-folder"


def test_missing_best_weights_are_refused(tmp_path):
    put(tmp_path, "checkpoint.pkl", epoch=4)
    (tmp_path / "weight.pkl").unlink()
    code, message = refusal({}, str(tmp_path))
    assert (code, "weight.pkl" in message) == ("missing-file", True)


def test_a_backup_that_cannot_be_copied_is_refused(tmp_path):
    put(tmp_path / "drive", "checkpoint.pkl", epoch=4)
    (tmp_path / "file").write_text("in the way")
    given = {"save_dir": str(tmp_path / "file" / "run"), "backup": str(tmp_path / "drive")}
    assert refusal(given, "auto")[0] == "not-restored"


def test_cores_strategy_and_limits_may_change_and_the_recipe_may_not(tmp_path):
    put(tmp_path, "checkpoint.pkl", epoch=4, num_cores=1, max_minutes=30, batch_size=16)
    given = {"num_cores": 8, "strategy": "launch", "max_minutes": 500, "save_minutes": 1}
    config = settings(given, str(tmp_path))[0]
    assert (config.num_cores, config.strategy, config.max_minutes) == (8, "launch", 500)
    assert settings({}, str(tmp_path))[0].max_minutes is None, "a limit is one session's"
    code, message = refusal({"batch_size": 32}, str(tmp_path))
    assert code == "fixed-setting"
    assert "--batch-size 32" in message and "(16)" in message
    assert refusal({"epochs": 4}, str(tmp_path))[0] == "already-trained"


def test_a_run_that_was_moved_knows_its_new_place(tmp_path):
    put(tmp_path / "a", "checkpoint.pkl", epoch=4, save_dir=str(tmp_path / "a"))
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert settings({}, str(tmp_path / "b"))[0].save_dir == str(tmp_path / "b")


# --- the lock, and what is claimed --------------------------------------------------------------


def test_a_users_file_in_the_folder_stays(tmp_path):
    (tmp_path / ".writable").write_text("mine")
    (tmp_path / ".mine.part").write_text("mine")
    run_dir.claim(tmp_path, 0, resuming=False)
    run_dir.release(tmp_path, created=False)
    assert {path.name for path in tmp_path.iterdir()} == {".writable", ".mine.part"}


@pytest.mark.parametrize("name", run_dir.FILES)
def test_a_new_run_replaces_no_file_that_was_there(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(RequestError) as error:
        run_dir.claim(tmp_path, 0, resuming=False)
    assert error.value.code in ("earlier-run", "foreign-file")
    assert str(tmp_path) in str(error.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"mine"]
    run_dir.claim(tmp_path, 0, resuming=True)
    run_dir.release(tmp_path, created=False)


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
)


def test_a_folder_in_use_is_refused_until_its_process_ends_in_whatever_way(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}; print(); sys.stdout.flush(); input()", tmp_path / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    for resuming in (False, True):
        with pytest.raises(RequestError) as error:
            run_dir.claim(tmp_path, 0, resuming)
        assert (error.value.code, str(tmp_path) in str(error.value)) == ("folder-in-use", True)
    holder.kill()
    holder.wait()
    run_dir.claim(tmp_path, 0, resuming=False)
    assert subprocess.run([sys.executable, "-c", HOLD, tmp_path / ".lock"]).returncode != 0
    run_dir.claim(tmp_path, 0, resuming=True)  # this process may once more
    run_dir.release(tmp_path, created=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_for_a_run_goes_with_it_if_nothing_was_written(tmp_path):
    assert run_dir.claim(tmp_path / "run", 0, resuming=False) == (tmp_path / "run", True)
    run_dir.release(tmp_path / "run", created=True)
    with pytest.raises(RequestError) as error:
        run_dir.claim(tmp_path / "run", 10**18, resuming=False)
    assert error.value.code == "disk-full"
    assert list(tmp_path.iterdir()) == []


# --- the log ------------------------------------------------------------------------------------


def test_lines_that_are_no_epochs_are_dropped(tmp_path):
    good = ['{"epoch": 0, "loss": 1.5, "iou": null}', '{"epoch": 1, "loss": null, "x": "y"}']
    bad = [
        '{"epoch": 2, "lo', "3", "null", "[]", "{}", '{"epoch": 2}', '{"loss": 1}', "[" * 100_000,
        '{"epoch": "2", "loss": 1}', '{"epoch": true, "loss": 1}', '{"epoch": -1, "loss": 1}',
        '{"epoch": 2, "loss": "x"}', '{"epoch": 2, "loss": 1, "iou": []}', '"' + "9" * 5000,
        '{"epoch": 2, "loss": 1, "fa": "x"}', '{"epoch": 2, "loss": 1%s}' % ("0" * 400),
        '{"epoch": 2, "loss": ' + "1" * 5000 + "}",
    ]  # fmt: skip
    lines = [line.encode() for line in (good[0], *bad, good[1])]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b"\xff\xfe"]))
    records = run_dir.read_log(tmp_path)
    assert [record["epoch"] for record in records] == [0, 1]
    assert run_dir.read_log(tmp_path, before=1) == records[:1]
    plots.curves(records, tmp_path / "curves.png")
