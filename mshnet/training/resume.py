"""Which settings a run has, and which checkpoint it continues from."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tpuscope.drives import DRIVE, MOUNT_DRIVE, is_remote
from tpuscope.errors import RequestError

from . import checkpoint, run_dir
from .backup import restore
from .config import Config
from .training_state import recorded_config, require_training_state

Log = Callable[[str], None]

AUTO = "auto"  # --resume auto: continue if there is something to continue

# What a run may do differently after an interruption and still be the same run.
_MAY_CHANGE = (
    "space_to_depth",
    "dataset_dir",
    "stage",
    "epochs",
    "lr",
    "device",
    "num_cores",
    "strategy",
    "cache",
    "workers",
    "compile_cache",
    "backup",
    "save_minutes",
    "max_minutes",
)
# What belongs to the machine or to one session, and is not taken from the checkpoint.
_OF_A_SESSION = ("workers", "weight_path", "max_minutes")
# Folders that a checkpoint from elsewhere may not choose: they are written to.
_OUTPUTS = ("backup", "compile_cache")


@dataclass
class _Search:
    """Where checkpoints of a run are looked for, and what is there; each file is read once."""

    resume: str
    folders: list[Path]  # the run's, then its backup's
    found: dict[Path, tuple[Path, dict]] = field(default_factory=dict)  # folder → path, content
    refused: list[tuple[Path, RequestError]] = field(default_factory=list)

    def read(self, folder: Path) -> None:
        path, content, refused = checkpoint.newest([folder], require_training_state)
        self.refused += refused
        if path:
            self.found[folder] = path, content

    def best(self) -> tuple[Path | None, dict]:
        """Return the checkpoint furthest in training; of equal ones that of the run's folder."""
        found = [self.found[folder] for folder in self.folders if folder in self.found]
        return max(found, key=lambda it: checkpoint.position(it[1]), default=(None, {}))

    @property
    def where(self) -> str:
        return " and ".join(map(str, self.folders))


def settings(
    overrides: dict, resume: str | None, log: Log
) -> tuple[Config, Path | None, dict | None]:
    """Return the settings of a run, and the checkpoint that it continues.

    The paths in a checkpoint are used only if the run is the user's own: the folder or the backup
    that it records is one of the folders that the request names. Otherwise (a run that was moved,
    or that somebody else made) it could choose what is written where: its ``backup`` and
    ``compile_cache`` are ignored with a message, and a data set has to be named.

    Args:
        overrides: settings by name.
        resume: None, ``"auto"``, or a run's folder, its backup's, or a checkpoint file.
        log: takes messages for people.

    Returns:
        The settings (``save_dir`` is a local folder), the checkpoint's path in that folder and its
        content; None and None for a new run.

    Raises:
        RequestError: there is nothing to resume, it cannot be resumed like this, or a file of
            another run would be replaced. Nothing was written then.
    """
    _require_mounted("--resume", resume)
    named = overrides
    overrides = _with_local_folder(overrides, log)
    if resume is None:
        return _new_run(overrides, named, auto=False)
    search, overrides = _search(resume, overrides, log)
    _, state = search.best()
    own = not state or _is_own(state, search.folders, overrides)
    _read_backup(search, overrides, state if own else {})
    found, state = search.best()
    for path, _ in search.refused:
        log(f"{path} is damaged or incomplete, and is passed over")
    if found is None:
        _refuse_or_begin(search, log)
        return _new_run(overrides, named, auto=True)
    _require_one_run(search, overrides)
    local = Path(overrides.get("save_dir") or search.folders[0])
    if resume != AUTO and found.parent == search.folders[0]:
        local = found.parent
    saved = _trusted(recorded_config(state, found), overrides, found, own, log)
    config = _merged(saved, overrides, search, found, state, local)
    if found.parent != local:
        _restore(search, found.parent, local)
    if state["best"] is not None and not (local / checkpoint.WEIGHTS).exists():
        raise RequestError(
            f"--resume {resume}: the run's best weights, {checkpoint.WEIGHTS}, are not beside "
            f"{found}; copy them there",
            code="missing-file",
        )
    return config, found, state


def _new_run(overrides: dict, named: dict, auto: bool) -> tuple[Config, None, None]:
    """Return the settings of a run that begins.

    Args:
        named: the request, before a ``--save-dir`` on Drive became the backup.

    Raises:
        RequestError: its backup is another run's.
    """
    config = Config(**overrides)
    if config.backup:
        flag = "--backup" if named.get("backup") else "--save-dir"
        run_dir.require_vacant(flag, Path(config.backup), auto)
    return config, None, None


def _search(resume: str, overrides: dict, log: Log) -> tuple[_Search, dict]:
    """Read the checkpoints in the folders that the request names.

    Returns:
        What is there, and the settings; a run on a network drive gets a local folder.

    Raises:
        RequestError: no folder is named, or it does not exist.
    """
    path = Path(resume)
    if resume == AUTO:
        folders = [Path(overrides[name]) for name in ("save_dir", "backup") if overrides.get(name)]
        if not folders:
            raise RequestError(
                "--resume auto looks for a checkpoint in --save-dir and --backup; name a folder "
                "that stays the same from session to session",
                code="no-folder",
            )
    elif not path.exists():
        raise RequestError(
            f"--resume {resume}: there is no {path}; name the folder of a run", code="missing-file"
        )
    elif path.is_dir() and is_remote(path):
        overrides = _with_local_folder({"save_dir": resume} | overrides, log) | {"backup": resume}
        folders = [Path(overrides["save_dir"]), path]
    else:
        folders = [path if path.is_dir() else path.parent]
    search = _Search(resume, folders)
    if resume != AUTO and not path.is_dir():
        content = checkpoint.load(path)
        require_training_state(content, path)
        search.found[folders[0]] = path, content
    else:
        for folder in folders:
            search.read(folder)
    return search, overrides


def _is_own(state: dict, folders: list[Path], overrides: dict) -> bool:
    """Whether a checkpoint records a folder that the request names as its run's or its backup."""
    named = {folder.resolve() for folder in folders} | run_dir.recorded_folders(overrides)
    return bool(named & run_dir.recorded_folders(state["config"]))


def _read_backup(search: _Search, overrides: dict, state: dict) -> None:
    """Read the backup, unless the request names a checkpoint file or it has been read.

    Args:
        state: of the run's own checkpoint, which may record a backup.
    """
    backup = overrides.get("backup") or state.get("config", {}).get("backup")
    if backup and Path(backup) not in search.folders and not Path(search.resume).is_file():
        search.folders.append(Path(backup))
        search.read(Path(backup))


def _require_one_run(search: _Search, overrides: dict) -> None:
    """Check that a run and the backup that is named for it belong together.

    Raises:
        RequestError: one would overwrite files of the other.
    """
    local, backup = search.folders[0], overrides.get("backup")
    if not backup or local not in search.found:
        return
    recorded = search.found[local][1]["config"]
    # A session that ended before its first checkpoint has recorded its backup in config.json only.
    if Path(backup).resolve() in (
        run_dir.recorded_folders(recorded) | run_dir.recorded_folders(run_dir.read_config(local))
    ):
        return
    try:
        run_dir.require_vacant("--backup", Path(backup))
    except RequestError as error:
        if error.code == "unreadable-folder":
            raise
        raise RequestError(
            f"{local} and {backup} hold different runs (the backup of the first is "
            f"{recorded.get('backup') or 'nowhere'}); name another --save-dir or another --backup",
            code="different-runs",
        ) from error


def _restore(search: _Search, source: Path, local: Path) -> None:
    """Copy the run from the folder that is further in training to its local folder.

    Raises:
        RequestError: files of another run are there, a run is being written there, or the disk is
            full.
    """
    try:
        if local not in search.found:
            run_dir.require_own(local, source)
        with run_dir.locked("--save-dir", local):
            # Files there belong to an earlier position: best weights of another epoch, for example.
            restore(source, local, overwrite=True)
    except OSError as error:
        raise RequestError(
            f"--resume {search.resume}: {source} cannot be copied to {local} ({error}); "
            "free some space, or choose another --save-dir",
            code="not-restored",
        ) from error


def _with_local_folder(overrides: dict, log: Log) -> dict:
    """Return the settings; a ``--save-dir`` on a network drive becomes a local folder's backup."""
    for name in ("save_dir", "backup"):
        _require_mounted(f"--{name.replace('_', '-')}", overrides.get(name))
    save_dir = overrides.get("save_dir")
    if not save_dir or not is_remote(Path(save_dir)):
        return overrides
    if overrides.get("backup"):
        raise RequestError(
            f"--save-dir {save_dir} is on a network drive, so it is the backup of a local folder "
            "already; leave --backup out, or name a local --save-dir",
            code="two-backups",
        )
    # Runs of the same name in different folders of Drive are different runs.
    place = hashlib.sha256(str(Path(save_dir).resolve()).encode()).hexdigest()[:6]
    local = Path("weight") / f"{Path(save_dir).name}-{place}"
    log(f"{save_dir} is on a network drive: the run lives in {local} and is copied there")
    return overrides | {"save_dir": str(local), "backup": str(save_dir)}


def _require_mounted(flag: str, path: str | None) -> None:
    """Check that a path on Drive is not on the local disk, which is deleted with the session.

    Raises:
        RequestError: Drive is not mounted.
    """
    if path and Path(path).resolve().is_relative_to(DRIVE) and not is_remote(Path(path)):
        raise RequestError(
            f"{flag} {path}: Drive is not mounted; first run {MOUNT_DRIVE}", code="not-mounted"
        )


def _refuse_or_begin(search: _Search, log: Log) -> None:
    """No checkpoint can be used: begin a new run if the request allows it.

    Raises:
        RequestError: it does not, or there are damaged checkpoints.
    """
    if search.refused:
        _, reason = search.refused[0]
        raise RequestError(
            f"--resume {search.resume}: no checkpoint in {search.where} is whole; start a new run "
            f"in another folder (weight.pkl, if it is there, can be its --weight-path): {reason}",
            code="nothing-whole",
        )
    if search.resume != AUTO:
        raise RequestError(
            f"--resume {search.resume}: there is no {search.folders[0] / checkpoint.CHECKPOINT}; "
            "name the folder of a run",
            code="missing-file",
        )
    log(f"--resume auto: no checkpoint in {search.where} yet, a new run begins")


def _trusted(saved: dict, overrides: dict, found: Path, own: bool, log: Log) -> dict:
    """Return the recorded settings that a resumed run obeys, see :func:`settings`.

    Raises:
        RequestError: the run is not the user's own, and no data set is named.
    """
    saved = {name: value for name, value in saved.items() if name not in _OF_A_SESSION}
    if own:
        return saved
    ignored = [n for n in _OUTPUTS if saved.pop(n, None) is not None and n not in overrides]
    if saved.get("dataset_dir") and "dataset_dir" not in overrides:
        raise RequestError(
            f"{found} comes from another folder or machine ({saved.get('save_dir')}); name the "
            f"data set with --dataset-dir (it was {saved['dataset_dir']})",
            code="foreign-run",
        )
    if ignored:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in ignored)
        log(f"{found} comes from another folder or machine: its {flags} is ignored")
    return saved


def _merged(
    saved: dict, overrides: dict, search: _Search, found: Path, state: dict, local: Path
) -> Config:
    """Return the checkpoint's settings, with what may differ taken from the request.

    Raises:
        RequestError: the request changes what a run keeps, or asks for fewer epochs than are done.
    """
    done, _ = checkpoint.position(state, found)
    try:
        own = Config.from_dict(saved | {"save_dir": str(local)})
    except RequestError as error:
        raise RequestError(
            f"--resume {search.resume}: {found} is damaged ({error})", code="damaged-checkpoint"
        ) from error
    config = Config.from_dict(own.as_dict() | overrides | {"save_dir": str(local)})
    for name, value in overrides.items():
        same = getattr(config, name) == getattr(own, name)
        if name == "save_dir":
            same = Path(value).resolve() == local.resolve()
        if not same and name not in _MAY_CHANGE:
            raise RequestError(
                f"--{name.replace('_', '-')} {value}: a resumed run keeps its own "
                f"({getattr(own, name)}); leave the flag out, or start a new run",
                code="fixed-setting",
            )
    if config.epochs < done:
        raise RequestError(
            f"--epochs {config.epochs}: the run has trained {done} already", code="already-trained"
        )
    return config
