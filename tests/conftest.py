"""Fixtures and settings of all tests."""

import os
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

# Small tensors gain nothing from more threads, and the workers of pytest-xdist share the cores.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# Under nohup, as in many CI systems, SIGHUP is ignored, and every process that a test starts
# inherits that. A run leaves an ignored signal ignored; the tests are about the others.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup() -> None:
    # Which worker runs a test, and after which others, must not change its numbers.
    torch.manual_seed(0)


# The tests compile with the project's own libtpu; those of another one say so.
NEWEST_COMPILER = os.environ.pop("TPUSCOPE_COMPILER", "") or str(
    Path(__file__).parents[1] / ".venv-compiler" / "bin" / "python"
)


@pytest.fixture(scope="session")
def newest_compiler() -> str:
    """Return a Python with the newest jax and libtpu."""
    if not Path(NEWEST_COMPILER).is_file():
        pytest.skip("no second compiler: `make compiler`, or set TPUSCOPE_COMPILER to its Python")
    return NEWEST_COMPILER


SIRST_BESIDE = Path(__file__).parents[2] / "shared" / "datasets" / "SIRST"


@pytest.fixture(scope="session")
def sirst() -> Path:
    """Return the folder of the real SIRST data set, which is not part of the project."""
    folder = Path(os.environ.get("MSHNET_SIRST") or SIRST_BESIDE)
    if not (folder / "trainval.txt").is_file():
        pytest.skip("no SIRST data set: set MSHNET_SIRST to its folder")
    return folder


@pytest.fixture
def tiny_dataset(tmp_path) -> Callable[..., Path]:
    """Return a function that writes small images with targets and returns their folder."""

    def write(train: int = 4, test: int = 2, size: int = 32, folder: Path | None = None) -> Path:
        folder = folder or tmp_path / "tiny"
        for part in ("images", "masks"):
            (folder / part).mkdir(parents=True)
        for file, split, count in (("trainval.txt", "train", train), ("test.txt", "test", test)):
            names = [f"{split}_{i}" for i in range(count)]
            for name in names:
                image, mask = tiny_sample(name, size)
                Image.fromarray(image).save(folder / "images" / f"{name}.png")
                Image.fromarray(mask).save(folder / "masks" / f"{name}.png")
            (folder / file).write_text("\n".join(names) + "\n")
        return folder

    return write


def tiny_sample(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noise with one or two targets of 3×3, and their mask of 0 and 255: uint8 (S, S)."""
    rng = np.random.default_rng(list(name.encode()))
    image = rng.integers(20, 90, (size, size), np.uint8)
    mask = np.zeros((size, size), np.uint8)
    half = size // 2
    for row in rng.permutation([0, half])[: rng.integers(1, 3)]:  # one in each half at most
        y, x = row + rng.integers(1, half - 4), rng.integers(1, size - 4)
        image[y : y + 3, x : x + 3] = 220
        mask[y : y + 3, x : x + 3] = 255
    return image, mask


@pytest.fixture
def huge_png() -> bytes:
    """A PNG of a few bytes whose header promises 20000×20000 pixels."""
    header = struct.pack(">4sIIBBBBB", b"IHDR", 20000, 20000, 8, 0, 0, 0, 0)
    header += struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + b"\0\0\0\2IDATx\x9c"
