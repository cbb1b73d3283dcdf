"""From ``--dataset-dir`` to decoded splits."""

from pathlib import Path

from tpuscope.errors import RequestError
from tpuscope.progress import someone_watches

from .layout import DataFolder
from .sample_cache import SampleCache
from .scenes import write_scenes

BUILT_IN = Path("datasets")  # folder of the built-in scenes, relative to the current folder
TRAIN_SCENES, TEST_SCENES = 200, 50


def built_in_scenes(size: int) -> Path:
    """Return the folder of built-in scenes of size × size pixels; write it on first use.

    Raises:
        RequestError: the folder cannot be written.
    """
    folder = BUILT_IN / f"built-in-{size}"
    try:
        return write_scenes(
            folder, TRAIN_SCENES, TEST_SCENES, size=size, progress=someone_watches()
        )
    except (OSError, ValueError) as error:
        raise RequestError(
            f"the built-in scenes cannot be written to {folder.resolve()} ({error}); "
            "work in another folder, or name a data set with --dataset-dir",
            "unwritable-scenes",
        ) from error


def open_split(folder: str | Path, split: str, channels: int, cache: str) -> SampleCache:
    """Read and check one split.

    Args:
        folder: a data set, see :mod:`~mshnet.data.layout`.
        split: ``"train"`` or ``"test"``.
        channels: 1 (grey) or 3.
        cache: ``"ram"``, ``"disk"`` or ``"none"``.

    Raises:
        RequestError: anything that training or testing would hit later.
    """
    store = SampleCache(DataFolder(folder).samples(split), channels, cache, f"read {split} images")
    if len(store.empty) == len(store):
        raise RequestError(
            f"no mask of the {split} split of {folder} holds a target; a pixel is target from half "
            "of the file type's maximum on, so masks stored as 0 and 1 must be multiplied by 255",
            "no-target",
        )
    return store


def describe(store: SampleCache, split: str) -> str:
    """Return one line for people: how many images, and what was unusual about their masks."""
    text = f"{split}: {len(store)} images"
    if store.touched:
        text += f", {len(store.touched)} masks were not binary and were cut at half of the maximum"
    if store.empty:
        text += f", {len(store.empty)} without a target"
    return text
