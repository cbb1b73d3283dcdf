"""Weight and checkpoint files: written whole or not at all, verified and never executed on load."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn

from tpuscope.errors import RequestError
from tpuscope.files import write_atomic, write_part

CHECKPOINT = "checkpoint.pkl"
PREVIOUS = "checkpoint.previous.pkl"  # the one before, in case the newest is damaged
WEIGHTS = "weight.pkl"
LARGEST = 2**31  # epoch or step that a checkpoint may record

Result = TypeVar("Result")


def to_host(value: Any) -> Any:
    """Return the same nested structure with every tensor on the host."""
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
    content = to_host(content)
    _explained(path, lambda: write_atomic(path, lambda file: torch.save(content, file)))


def save_newest(content: dict, folder: Path) -> None:
    """Write ``checkpoint.pkl``; the one that was there becomes ``checkpoint.previous.pkl``.

    Raises:
        OSError: as :func:`save`; both files are untouched.
    """
    newest = folder / CHECKPOINT
    content = to_host(content)
    part = _explained(newest, lambda: write_part(newest, lambda file: torch.save(content, file)))
    # A damaged file must not replace the last intact one.
    if is_whole(newest):
        os.replace(newest, folder / PREVIOUS)
    os.replace(part, newest)


def _explained(path: Path, write: Callable[[], Result]) -> Result:
    """Write; a failure names the file and says what to do.

    Raises:
        OSError: not written.
    """
    try:
        return write()
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch.save reports a failed write
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise OSError(
            f"{path} could not be written: {reason}; what was there before is whole: free "
            f"some space and go on with --resume {path.parent}"
        ) from error


def is_whole(path: Path) -> bool:
    """Return whether a file of ``torch.save`` is complete, by its own checksums."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return _archive_fault(file) is None
    except OSError:
        return False


def _archive_fault(file: BinaryIO) -> str | None:
    """Return what the checksums (CRC-32) of a zip archive say is wrong, or None.

    PyTorch's own reader checks none of them: a flipped bit loads as another number.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            # A torch.save that fails while it describes the tensors leaves an archive without this.
            if not any(name.endswith("data.pkl") for name in archive.namelist()):
                return "it lacks data.pkl"
            member = archive.testzip()
    except Exception as error:  # damaged headers: UnicodeDecodeError, NotImplementedError, …
        return _first_line(error)
    return f"{member} fails its checksum" if member else None


def newest(
    folders: Iterable[Path], require: Callable[[dict, Path], None] | None = None
) -> tuple[Path | None, dict, list[tuple[Path, RequestError]]]:
    """Return the checkpoint that is furthest in training.

    In each folder that is ``checkpoint.pkl``, or ``checkpoint.previous.pkl`` if that one cannot be
    used. Each file is read once.

    Args:
        folders: those of a run and of its backup, for example; they may be missing.
        require: checks a content that was loaded; raises RequestError if it cannot be used.

    Returns:
        Its path (None: there is none) and content, and the files that cannot be used, with reasons.
    """
    best, content, refused = None, {}, []
    for folder in folders:
        for path in (folder / CHECKPOINT, folder / PREVIOUS):
            if not path.exists():
                continue
            try:
                found = load(path)
                if require:
                    require(found, path)
                reached = position(found, path)
                if best is None or reached > position(content):
                    best, content = path, found
            except RequestError as error:
                refused.append((path, error))
            else:
                break
    return best, content, refused


def position(content: dict, path: str | Path = CHECKPOINT) -> tuple[int, int]:
    """Return the number of finished epochs, and of finished steps in the next one.

    Raises:
        RequestError: the checkpoint records no such numbers.
    """
    for name, least in (("epoch", -1), ("step", 0)):
        value = content.get(name, least)
        if type(value) is not int or not least <= value < LARGEST:
            raise damaged(path, name, value)
    return content.get("epoch", -1) + 1, content.get("step", 0)


def damaged(path: str | Path, field: str, value: Any) -> RequestError:
    """Return the error for a field of a checkpoint that holds what it cannot hold."""
    simple = value is None or isinstance(value, str | float | bool)
    shown = repr(value)[:60] if simple else f"a wrong {type(value).__name__}"
    return RequestError(
        f"{path} is damaged: its {field} is {shown}; copy it again, or start from its weights "
        f"with --weight-path {path}",
        code="damaged-checkpoint",
    )


def load(path: str | Path) -> dict:
    """Return the dict of tensors and plain values in a weight or checkpoint file.

    The file is read once; the checksums of its archive are verified, and no code in it is run.

    Raises:
        RequestError: missing, empty, damaged, or holding more than tensors and plain values.
    """
    path = Path(path)
    if path.is_dir():
        raise RequestError(
            f"{path} is a folder; name the file in it, such as {path / WEIGHTS}", code="is-a-folder"
        )
    if not path.exists():
        raise RequestError(f"weight file {path} does not exist", code="missing-file")
    if not path.is_file():  # opening a FIFO would block
        raise RequestError(f"{path} is not a regular file; name another", code="not-a-file")
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror}); copy it again or choose another",
            code="unreadable-file",
        ) from error
    if not packed:
        raise RequestError(
            f"weight file {path} is empty; copy it again or choose another", code="damaged-file"
        )
    content = _unpack(packed, path)
    if not isinstance(content, dict):
        raise RequestError(
            f"{path} holds a {type(content).__name__}, not weights; expected a state_dict, or a "
            "dict with state_dict or net",
            code="no-weights",
        )
    return content


def _unpack(packed: bytes, path: Path) -> Any:
    """Return what ``torch.load`` makes of a file's bytes.

    Raises:
        RequestError: damaged, foreign, or able to run code.
    """
    file = io.BytesIO(packed)
    # PyTorch before 1.6 wrote no archive, and no checksums.
    fault = None
    if packed.startswith(b"PK") or zipfile.is_zipfile(file):
        fault = _archive_fault(file)
    try:
        if fault is None:
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RequestError(
            f"{path} is damaged, or holds Python objects besides tensors; such a file could run "
            "code and is not opened. Save its state_dict alone where it comes from",
            code="unsafe-file",
        ) from error
    except Exception as error:  # foreign bytes: IndexError, AssertionError, struct.error, …
        fault = _first_line(error)
    raise RequestError(
        f"{path} is damaged or not a PyTorch file ({fault}); copy it again", code="damaged-file"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def weights_of(content: dict, path: str | Path) -> dict[str, Tensor]:
    """Return the state_dict in any of the forms that MSHNet weights come in.

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
            f"{path} holds no weights: expected a state_dict, or a dict with state_dict or net",
            code="no-weights",
        )
    return {key.removeprefix("module."): value for key, value in content.items()}


def load_weights(model: nn.Module, path: str | Path) -> bool:
    """Load a weight file of any form into the model.

    Returns:
        Whether the fused head is trained. Only files that this project saved during warm-up
        record False; then the full-size head is the one to use.

    Raises:
        RequestError: unreadable, or made for another architecture; the model is unchanged then.
    """
    content = load(path)
    fill(model, weights_of(content, path), path)
    return content.get("full", True) is not False


def fill(model: nn.Module, weights: dict[str, Tensor], path: str | Path) -> None:
    """Copy a state_dict into the model, all of it or nothing.

    Args:
        path: where the weights come from, for messages.

    Raises:
        RequestError: names or shapes are those of another architecture, or a value is NaN or
            infinite.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in weights]
    unknown = [key for key in weights if key not in own]
    if missing or unknown:
        example = f"lacks {missing[0]}" if missing else f"has the unknown {unknown[0]}"
        raise RequestError(
            f"{path} is not for this MSHNet: it {example} "
            f"({len(missing)} missing, {len(unknown)} unknown names)",
            code="other-network",
        )
    for key, value in own.items():
        if weights[key].shape != value.shape:
            raise RequestError(
                f"{path} is for an MSHNet of other widths: {key} is "
                f"{tuple(weights[key].shape)}, here {tuple(value.shape)}",
                code="other-network",
            )
    for key, value in own.items():
        if not is_finite(weights[key], value.dtype):
            raise RequestError(
                f"{path} cannot be used: {key} holds NaN or infinite values; take weights from "
                "before training diverged",
                code="non-finite-weights",
            )
    model.load_state_dict(weights)


def is_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether an ordinary dense tensor on the host holds finite numbers only.

    Args:
        dtype: in which the numbers will be kept; 1e300 is not finite in float32.
    """
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.is_quantized or tensor.is_complex():
        return False
    return bool(torch.isfinite(tensor.to(dtype)).all())
