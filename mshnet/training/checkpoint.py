"""Weights and checkpoints: written whole or not at all, read without running foreign code."""

import os
import pickle
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpuscope.errors import RequestError

CHECKPOINT = "checkpoint.pkl"
PREVIOUS = "checkpoint.previous.pkl"  # the one before, should the newest be damaged
WEIGHTS = "weight.pkl"


def to_host(value: Any) -> Any:
    """The same nested structure with every tensor on the host."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_host(item) for item in value)
    return value


def save(content: dict, path: Path) -> None:
    """Write under a temporary name, flush to disk, rename: a reader never sees half a file.

    Raises:
        OSError: the disk is full or gone; the file that was there before is untouched.
    """
    os.replace(_write(content, path), path)


def save_newest(content: dict, folder: Path) -> None:
    """Write ``checkpoint.pkl``; the one that was there becomes ``checkpoint.previous.pkl``.

    Raises:
        OSError: as :func:`save`; both files are as they were then.
    """
    newest = folder / CHECKPOINT
    part = _write(content, newest)
    # A damaged one must not take the place of the last that is whole.
    if is_whole(newest):
        os.replace(newest, folder / PREVIOUS)
    os.replace(part, newest)


def _write(content: dict, path: Path) -> Path:
    """A complete file under a temporary name beside ``path``."""
    part = path.with_name(f".{path.name}.part")
    content = to_host(content)
    try:
        with open(part, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):  # RuntimeError: torch.save's failed write
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise OSError(
                f"{path} could not be written: {reason}; what was there before is whole: free "
                f"some space and go on with --resume {path.parent}"
            ) from error
        raise
    return part


def is_whole(path: Path) -> bool:
    """Whether a file that torch.save wrote is there with every byte: by its own checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            # A torch.save that fails while it describes the tensors leaves an archive without this.
            described = any(name.endswith("data.pkl") for name in file.namelist())
            return described and file.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError):
        return False


def newest(folders: Iterable[Path]) -> tuple[Path | None, dict, list[Path]]:
    """The checkpoint furthest in training, of those that are whole.

    Args:
        folders: of a run and of its backup, say; they may be missing.

    Returns:
        Its path (None: there is none) and content, and the damaged files that were passed over.

    Raises:
        RequestError: one is whole but holds more than tensors and plain values.
    """
    best, content, damaged = None, {}, []
    for folder in folders:
        for path in (folder / CHECKPOINT, folder / PREVIOUS):
            if not path.exists():
                continue
            if not is_whole(path):
                damaged.append(path)
                continue
            found = load(path)
            if best is None or position(found) > position(content):
                best, content = path, found
    return best, content, damaged


def position(content: dict) -> tuple[int, int]:
    """Epochs finished, and steps done in the next one."""
    return int(content.get("epoch", -1)) + 1, int(content.get("step", 0))


def load(path: str | Path) -> dict:
    """The dict of tensors and plain values in a weight or checkpoint file.

    Raises:
        RequestError: missing, empty, truncated, or holding more than tensors and plain values.
    """
    path = Path(path)
    if path.is_dir():
        raise RequestError(f"{path} is a folder; name the file in it, such as {path / WEIGHTS}")
    if not path.exists():
        raise RequestError(f"weight file {path} does not exist")
    if path.stat().st_size == 0:
        raise RequestError(f"weight file {path} is empty; copy it again or choose another")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"{path} is damaged, or holds Python objects besides tensors; such a file could run "
            "code and is not opened. Save its state_dict alone where it comes from"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(
            f"{path} is damaged or not a PyTorch file ({reason}); copy it again"
        ) from error
    if not isinstance(content, dict):
        raise RequestError(
            f"{path} holds a {type(content).__name__}, not weights; expected a state_dict, or a "
            "dict with state_dict or net"
        )
    return content


def weights_of(content: dict, path: str | Path) -> dict[str, Tensor]:
    """The state_dict in any of the forms that MSHNet weights come in.

    A bare state_dict, a dict under ``state_dict``, a checkpoint under ``net``; names may carry
    the ``module.`` of DataParallel.

    Raises:
        RequestError: none of these.
    """
    for key in ("state_dict", "net"):
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    if not content or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise RequestError(
            f"{path} holds no weights: expected a state_dict, or a dict with state_dict or net"
        )
    return {key.removeprefix("module."): value for key, value in content.items()}


def load_weights(model: nn.Module, path: str | Path) -> bool:
    """Load a weight file of any form into the model.

    Returns:
        Whether the fused head is trained. Only weights that this project saved during warm-up
        say no; then the full-size head is the one to use.

    Raises:
        RequestError: unreadable, or made for another architecture; the model is unchanged then.
    """
    content = load(path)
    fill(model, weights_of(content, path), path)
    return bool(content.get("full", True))


def fill(model: nn.Module, weights: dict[str, Tensor], path: str | Path) -> None:
    """Put a state_dict into the model, all or nothing.

    Raises:
        RequestError: names or shapes are those of another architecture.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in weights]
    unknown = [key for key in weights if key not in own]
    if missing or unknown:
        example = f"lacks {missing[0]}" if missing else f"has the unknown {unknown[0]}"
        raise RequestError(
            f"{path} is not for this MSHNet: it {example} "
            f"({len(missing)} missing, {len(unknown)} unknown names)"
        )
    for key, value in own.items():
        if weights[key].shape != value.shape:
            raise RequestError(
                f"{path} is for an MSHNet of other widths: {key} is "
                f"{tuple(weights[key].shape)}, here {tuple(value.shape)}"
            )
    model.load_state_dict(weights)
