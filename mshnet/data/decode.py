"""Image files to arrays: any mode in, 8-bit out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from tpuscope.errors import RequestError

from .layout import require_regular

# By content, whatever the suffix says. None of them starts another program, as Pillow does for EPS.
FORMATS = ("PNG", "BMP", "JPEG", "TIFF", "GIF", "WEBP", "PPM")


def open_image(path: Path) -> Image.Image:
    """Decode an image file.

    Pillow skips the checksums of PNG data when it decodes, so they are verified separately. BMP and
    JPEG have none: there only damage that stops the decoder is found.

    Raises:
        RequestError: the file is missing, damaged, or not a regular file with an image.
    """
    with _regular_file(path) as file:
        image = _open(file)
        image.load()
        file.seek(0)
        _open(file).verify()
        return image


def read_header(path: Path, verify: bool = False) -> tuple[str, tuple[int, int]]:
    """Return an image file's mode and (width, height) without decoding it.

    Args:
        path: the file.
        verify: also compare a PNG's checksums, which reads the whole file.

    Raises:
        RequestError: as :func:`open_image`; damage behind a header is found in PNG files only.
    """
    with _regular_file(path) as file:
        image = _open(file)
        if verify:
            image.verify()
        return image.mode, image.size


def _open(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:  # which shows the file as an object of Python
        raise OSError(f"its content is none of {', '.join(FORMATS)}") from error


@contextlib.contextmanager
def _regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open an image file; whatever fails while it is read becomes a RequestError."""
    require_regular(path)
    try:
        with open(path, "rb") as file:
            yield file
    except Exception as error:  # on damaged bytes Pillow raises nearly every type
        raise RequestError(
            f"{path} cannot be read as an image ({error}); it is damaged or incomplete: "
            "copy it again from the source",
            "damaged-file",
        ) from error


def read_image(path: Path, channels: int = 1) -> np.ndarray:
    """Read an infrared frame as uint8, (H, W) for one channel or (H, W, 3).

    Colour becomes luma (ITU-R 601) for one channel; alpha is dropped. Frames of more than 8 bits
    are stretched linearly from their own minimum and maximum to 0..255, because sensors use 10 to
    14 of the 16 bits. Pixels that are not finite take no part in the stretch: NaN becomes 0.

    Raises:
        RequestError: see :func:`open_image`.
    """
    return to_uint8(open_image(path), channels)


def to_uint8(image: Image.Image, channels: int) -> np.ndarray:
    """Return the array of :func:`read_image` for a decoded image."""
    if is_deep(image):
        values = np.asarray(image).astype(np.float64)
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0, 0)
        values = np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low
        scaled = values * (255 / (high - low)) if high > low else np.zeros_like(values)
        image = Image.fromarray(np.round(scaled).astype(np.uint8))
    if image.mode not in ("L", "RGB"):
        grey = image.mode in ("1", "LA")
        image = image.convert("L" if grey else "RGB")
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def read_mask(path: Path) -> tuple[np.ndarray, bool]:
    """Read a mask as uint8 of 0 and 1, (H, W), and whether it held values between the extremes.

    A pixel is target from half of the file type's maximum on: 128 of 255, 32768 of 65535.

    Raises:
        RequestError: see :func:`open_image`.
    """
    image = open_image(path)
    if is_deep(image):
        values, top = np.asarray(image), 65535
    else:
        if image.mode != "L":
            image = image.convert("RGB").convert("L")  # through the palette, without alpha
        values, top = np.asarray(image), 255
    mask = (values > top / 2).astype(np.uint8)
    return mask, bool(((values != 0) & (values != top)).any())


def is_deep(image: Image.Image) -> bool:
    """Return whether pixels have more than 8 bits a channel."""
    return image.mode.startswith(("I", "F"))
