"""Where a data set keeps its images, masks and split lists.

Two layouts are read, each with ``images/`` and ``masks/``::

    DIR/trainval.txt   DIR/test.txt                       IRSTD-1k, NUDT-SIRST, SIRST
    DIR/img_idx/train_NAME.txt   DIR/img_idx/test_NAME.txt  BasicIRSTD and others

Lists hold one name a line, with or without a suffix, with either kind of line ending. Images and
masks may be png, bmp or jpg; a mask may be called ``NAME_pixels0`` as in the original SIRST.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

from tpuscope.errors import RequestError

SUFFIXES = (".png", ".bmp", ".jpg", ".jpeg")
SPLITS = ("train", "test")
_LIST_NAMES = {"train": ("trainval.txt", "train.txt"), "test": ("test.txt",)}


@dataclass(frozen=True)
class Sample:
    """One image of a split; a path is None where no file was found."""

    name: str
    image: Path | None
    mask: Path | None


class DataFolder:
    """The files of one data set.

    Args:
        folder: the folder that holds ``images/``, ``masks/`` and the lists.

    Raises:
        RequestError: the folder, ``images/`` or ``masks/`` is missing.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if self.folder.is_file():
            raise RequestError(
                f"data set {self.folder} is a file; --stage unpacks archives", "not-a-folder"
            )
        if not self.folder.is_dir():
            raise RequestError(
                f"data set folder {self.folder} does not exist; "
                "datasets/README.md tells where to get each data set",
                "missing-folder",
            )
        self._files: dict[str, dict[str, Path]] = {}
        for kind in ("images", "masks"):
            if not (self.folder / kind).is_dir():
                raise RequestError(
                    f"{self.folder} has no folder {kind}/; expected {self.folder}/images, "
                    f"{self.folder}/masks and the lists trainval.txt and test.txt",
                    "no-data-set",
                )
            self._files[kind] = _index(self.folder / kind)

    def list_file(self, split: str) -> Path:
        """Return the file with the names of a split, ``"train"`` or ``"test"``.

        Raises:
            RequestError: there is no list, or several and none is named after the folder.
        """
        for name in _LIST_NAMES[split]:
            if (self.folder / name).is_file():
                return self.folder / name
        indexed = sorted((self.folder / "img_idx").glob(f"{split}_*.txt"))
        own = f"{split}_{self.folder.absolute().name}"  # absolute: "." has no name
        named = [path for path in indexed if path.stem == own]
        if len(indexed) == 1 or named:
            return (named or indexed)[0]
        if indexed:
            found = ", ".join(path.name for path in indexed)
            raise RequestError(
                f"{self.folder}/img_idx has several {split} lists ({found}); "
                f"keep one, or copy one to {self.folder}/{_LIST_NAMES[split][0]}",
                "several-lists",
            )
        raise RequestError(
            f"{self.folder} has no {split} list; expected {_LIST_NAMES[split][0]} "
            f"or img_idx/{own}.txt with one name a line",
            "missing-list",
        )

    def names(self, split: str) -> list[str]:
        """Return names in the order of the list, without suffixes.

        Raises:
            RequestError: the list is missing, empty or not text.
        """
        path = self.list_file(split)
        require_regular(path)
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{path} is not a text file in UTF-8; expected one image name a line", "not-text"
            ) from error
        except OSError as error:
            raise RequestError(
                f"{path} cannot be read ({error.strerror}); copy it again from the source",
                "unreadable-file",
            ) from error
        names = [_stem(line.strip()) for line in lines if line.strip()]
        if not names:
            raise RequestError(f"{path} is empty; it must hold one image name a line", "empty-list")
        return names

    def locate(self, name: str) -> Sample:
        """Return image and mask of a name; None for a file that does not exist."""
        image = self._files["images"].get(name)
        mask = self._files["masks"].get(name) or self._files["masks"].get(f"{name}_pixels0")
        return Sample(name, image, mask)

    def samples(self, split: str) -> list[Sample]:
        """Return all samples of a split; every image and mask exists.

        Raises:
            RequestError: the list or a file is missing, or the list is empty.
        """
        samples = [self.locate(name) for name in self.names(split)]
        for kind in ("image", "mask"):
            missing = [s.name for s in samples if getattr(s, kind) is None]
            if missing:
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise RequestError(
                    f"{self.list_file(split)} names {missing[0]}{more}, but {self.folder}/{kind}s "
                    f"has no {missing[0]} as png, bmp or jpg; `mshnet check-data {self.folder}` "
                    "lists all",
                    "missing-file",
                )
        return samples


def require_regular(path: Path) -> None:
    """Refuse pipes, sockets and devices before they are opened: opening a pipe blocks.

    Raises:
        RequestError: the path is missing or is not a regular file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist", "missing-file") from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read ({error.strerror}); copy it again from the source",
            "unreadable-file",
        ) from error
    if not stat.S_ISREG(mode):
        raise RequestError(
            f"{path} is not a regular file; remove it or copy it again", "not-a-file"
        )


def _stem(name: str) -> str:
    """Return the name without an image suffix; other dots belong to the name."""
    path = Path(name.replace("\\", "/"))
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


def _index(folder: Path) -> dict[str, Path]:
    """Return image files by name; of several suffixes the first of SUFFIXES wins."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
    files.sort(key=lambda path: SUFFIXES.index(path.suffix.lower()), reverse=True)
    return {path.stem: path for path in files}
