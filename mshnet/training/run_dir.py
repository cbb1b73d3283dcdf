"""The folder that a run owns, and the log in it."""

import contextlib
import datetime
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from tpuscope.errors import RequestError

from .checkpoint import CHECKPOINT, PREVIOUS
from .config import Config

LOG = "metrics.jsonl"
CONFIG = "config.json"


def require_writable(flag: str, folder: Path) -> None:
    """Make the folder if needed, and prove that a file can be written there.

    Raises:
        RequestError: it cannot; names the flag and the folder.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise RequestError(
            f"{flag} {folder} cannot be written ({error.strerror}); choose another folder"
        ) from error


def claim(save_dir: str | Path | None, bytes_needed: int, resuming: bool) -> tuple[Path, bool]:
    """Create the run's folder and make sure that it can take what will be written.

    Args:
        save_dir: wanted folder; None makes ``weight/MSHNet-<timestamp>``.
        bytes_needed: of all files of a run together.
        resuming: an earlier run in the folder is expected rather than refused.

    Returns:
        The folder, and whether it was made just now.

    Raises:
        RequestError: not writable, too little space, or another run's.
    """
    if save_dir is None:
        stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        save_dir = Path("weight") / f"MSHNet-{stamp}"
    folder = Path(save_dir)
    if not resuming and any((folder / name).exists() for name in (CHECKPOINT, PREVIOUS)):
        raise RequestError(
            f"--save-dir {folder} holds an earlier run; continue it with --resume {folder}, "
            "or choose another folder"
        )
    created = not folder.exists()
    require_writable("--save-dir", folder)
    free = shutil.disk_usage(folder).free
    if free < bytes_needed:
        raise RequestError(
            f"--save-dir {folder} has {free / 1e6:.0f} MB free, a run writes up to "
            f"{bytes_needed / 1e6:.0f} MB; free some space or choose another folder"
        )
    return folder, created


def release(run_folder: Path) -> None:
    """Remove a claimed folder again, if nothing was written into it."""
    with contextlib.suppress(OSError):
        run_folder.rmdir()


def write_config(folder: Path, config: Config) -> None:
    """``config.json``: every setting of the run."""
    _replace(folder / CONFIG, json.dumps(config.as_dict(), indent=2) + "\n")


def read_log(folder: Path, before: int | None = None) -> list[dict]:
    """The epochs in ``metrics.jsonl``; a line that a killed run left half-written is dropped.

    Args:
        before: only epochs below this one.
    """
    path = folder / LOG
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if before is None or record["epoch"] < before:
            records.append(record)
    return records


def rewrite_log(folder: Path, records: list[dict]) -> None:
    """Replace the log, as a resumed run does with the epochs that it will not repeat."""
    _replace(folder / LOG, "".join(to_json(record) + "\n" for record in records))


def append_log(folder: Path, record: dict) -> None:
    """One more epoch."""
    with open(folder / LOG, "a") as file:
        file.write(to_json(record) + "\n")


def to_json(value: Any) -> str:
    """One line of JSON; NaN (Pd of a set without targets, log) is not JSON and becomes null."""

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: clean(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [clean(entry) for entry in item]
        return None if isinstance(item, float) and math.isnan(item) else item

    return json.dumps(clean(value), allow_nan=False)


def _replace(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
