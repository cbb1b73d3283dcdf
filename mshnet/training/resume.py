"""Which settings a run has, and which checkpoint it continues from."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from tpuscope.drives import DRIVE, MOUNT_DRIVE, is_remote
from tpuscope.errors import RequestError

from . import checkpoint
from .backup import restore
from .config import Config

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


def settings(
    overrides: dict, resume: str | None, log: Callable[[str], None]
) -> tuple[Config, Path | None, dict | None]:
    """The settings of a run, and the checkpoint that it continues.

    Args:
        overrides: settings by name.
        resume: None, ``"auto"``, or a run's folder, its backup's, or a checkpoint file.
        log: takes messages for people.

    Returns:
        The settings (``save_dir`` is a local folder), the checkpoint's path in that folder and its
        content; None and None for a new run.

    Raises:
        RequestError: there is nothing to resume, or it cannot be resumed like this.
    """
    _require_mounted("--resume", resume)
    overrides = _with_local_folder(overrides, log)
    if resume is None:
        return Config(**overrides), None, None
    if resume == AUTO:
        folders = [Path(overrides[name]) for name in ("save_dir", "backup") if overrides.get(name)]
        if not folders:
            raise RequestError(
                "--resume auto looks for a checkpoint in --save-dir and --backup; name a folder "
                "that stays the same from session to session"
            )
    elif is_remote(Path(resume)) and Path(resume).is_dir():
        overrides = _with_local_folder({"save_dir": resume} | overrides, log) | {"backup": resume}
        folders = [Path(overrides["save_dir"]), Path(resume)]
    else:
        path = Path(resume)
        if not path.exists():
            raise RequestError(f"--resume {resume}: there is no {path}; name the folder of a run")
        folders = [path if path.is_dir() else path.parent]
    if resume != AUTO and Path(resume).is_file():
        found, state, damaged = Path(resume), checkpoint.load(resume), []
    else:
        found, state, damaged = checkpoint.newest(folders)
        overrides = {"backup": _recorded(state).get("backup")} | overrides
        if overrides["backup"] and Path(overrides["backup"]) not in folders:
            folders.append(Path(overrides["backup"]))
            found, state, damaged = checkpoint.newest(folders)
    if len(folders) == 2:
        _require_one_run(*folders)
    for path in damaged:
        log(f"{path} is damaged or incomplete, and is passed over")
    if found is None:
        return _nothing_found(overrides, resume, folders, damaged, log)
    _require_training_state(resume, found, state)
    local = Path(overrides.get("save_dir") or folders[0])
    if resume != AUTO and found.parent == folders[0]:
        local = folders[0]
    config = _merged(overrides, resume, found, state, local)
    if found.parent != local:
        try:
            # What is there belongs to an earlier position: best weights of another epoch, say.
            restore(found.parent, local, overwrite=True)
        except OSError as error:
            raise RequestError(
                f"--resume {resume}: {found.parent} cannot be copied to {local} ({error}); "
                "free some space, or choose another --save-dir"
            ) from error
    if state["best"] is not None and not (local / checkpoint.WEIGHTS).exists():
        raise RequestError(
            f"--resume {resume}: the run's best weights, {checkpoint.WEIGHTS}, are not beside "
            f"{found}; copy them there"
        )
    return config, found, state


def _require_one_run(local: Path, backup: Path) -> None:
    """The second folder is the first one's backup, or one of them is empty.

    Raises:
        RequestError: they hold different runs; one would overwrite the other.
    """
    here, content, _ = checkpoint.newest([local])
    there, _, _ = checkpoint.newest([backup])
    recorded = _recorded(content).get("backup")
    if here and there and (not recorded or Path(recorded).resolve() != backup.resolve()):
        raise RequestError(
            f"{local} and {backup} hold different runs (the backup of the first is "
            f"{recorded or 'nowhere'}); name another --save-dir or another --backup"
        )


def _with_local_folder(overrides: dict, log: Callable[[str], None]) -> dict:
    """A ``--save-dir`` on a network drive becomes the backup of a local folder."""
    for name in ("save_dir", "backup"):
        _require_mounted(f"--{name.replace('_', '-')}", overrides.get(name))
    save_dir = overrides.get("save_dir")
    if not save_dir or not is_remote(Path(save_dir)):
        return overrides
    if overrides.get("backup"):
        raise RequestError(
            f"--save-dir {save_dir} is on a network drive, so it is the backup of a local folder "
            "already; leave --backup out, or name a local --save-dir"
        )
    # Runs of the same name in different folders of Drive are different runs.
    place = hashlib.sha256(str(Path(save_dir).resolve()).encode()).hexdigest()[:6]
    local = Path("weight") / f"{Path(save_dir).name}-{place}"
    log(f"{save_dir} is on a network drive: the run lives in {local} and is copied there")
    return overrides | {"save_dir": str(local), "backup": str(save_dir)}


def _require_mounted(flag: str, path: str | None) -> None:
    """Without Drive its mount point is a folder of the local disk, and goes with the session.

    Raises:
        RequestError: the path is Drive's, and Drive is not there.
    """
    if path and Path(path).resolve().is_relative_to(DRIVE) and not is_remote(Path(path)):
        raise RequestError(f"{flag} {path}: Drive is not mounted; first run {MOUNT_DRIVE}")


def _nothing_found(
    overrides: dict,
    resume: str,
    folders: list[Path],
    damaged: list[Path],
    log: Callable[[str], None],
) -> tuple[Config, None, None]:
    where = " and ".join(map(str, folders))
    if damaged:
        raise RequestError(
            f"--resume {resume}: no checkpoint in {where} is whole; start a new run in another "
            "folder (weight.pkl, if it is there, can be its --weight-path)"
        )
    if resume != AUTO:
        raise RequestError(
            f"--resume {resume}: there is no {folders[0] / checkpoint.CHECKPOINT}; "
            "name the folder of a run"
        )
    log(f"--resume auto: no checkpoint in {where} yet, a new run begins")
    return Config(**overrides), None, None


def _recorded(state: dict) -> dict:
    recorded = state.get("config")
    return recorded if isinstance(recorded, dict) else {}


def _require_training_state(resume: str, path: Path, state: dict) -> None:
    if not {"net", "optimizer", "epoch", "best", "config"} <= state.keys():
        raise RequestError(
            f"--resume {resume}: {path} holds weights but no training state; start from them with "
            f"--weight-path {path}"
        )


def _merged(overrides: dict, resume: str, path: Path, state: dict, local: Path) -> Config:
    """The checkpoint's settings, with what may differ taken from the request."""
    try:
        saved = {k: v for k, v in state["config"].items() if k not in _OF_A_SESSION}
        own = Config.from_dict(saved | {"save_dir": str(local)}).as_dict()
        config = Config.from_dict(saved | overrides | {"save_dir": str(local)})
        done = int(state["epoch"]) + 1
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"--resume {resume}: {path} is damaged ({error})") from error
    wanted = config.as_dict()
    for name, value in overrides.items():
        same = wanted[name] == own[name]
        if name == "save_dir":
            same = Path(value).resolve() == local.resolve()
        if not same and name not in _MAY_CHANGE:
            raise RequestError(
                f"--{name.replace('_', '-')} {value}: a resumed run keeps its own ({own[name]}); "
                "leave the flag out, or start a new run"
            )
    if config.epochs < done:
        raise RequestError(f"--epochs {config.epochs}: the run has trained {done} already")
    return config
