"""Image files to arrays: any mode in, 8-bit out."""

from pathlib import Path

import numpy as np
from PIL import Image

from tpuscope.errors import RequestError

# What Pillow raises for a file that is cut short, foreign or damaged.
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def open_image(path: Path) -> Image.Image:
    """Decoded image.

    Raises:
        RequestError: the file is missing, truncated or no image.
    """
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except FileNotFoundError as error:
        raise RequestError(f"{path} does not exist") from error
    except _UNREADABLE as error:
        raise RequestError(
            f"{path} cannot be read as an image ({error}); it is damaged or incomplete: "
            "copy it again from the source"
        ) from error


def read_image(path: Path, channels: int = 1) -> np.ndarray:
    """An infrared frame as uint8, (H, W) for one channel or (H, W, 3).

    Colour goes to luma (ITU-R 601) when one channel is wanted; alpha is dropped. Frames of more
    than 8 bits are stretched linearly from their own minimum..maximum to 0..255, because sensors
    use 10 to 14 of the 16 bits.
    """
    return to_uint8(open_image(path), channels)


def to_uint8(image: Image.Image, channels: int) -> np.ndarray:
    """The array of :func:`read_image` from an opened image."""
    if is_deep(image):
        values = np.asarray(image).astype(np.float64)
        low, high = values.min(), values.max()
        scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
        image = Image.fromarray(np.round(scaled).astype(np.uint8))
    if image.mode not in ("L", "RGB"):
        grey = image.mode in ("1", "LA")
        image = image.convert("L" if grey else "RGB")
    return np.asarray(image.convert("L" if channels == 1 else "RGB"))


def read_mask(path: Path) -> tuple[np.ndarray, bool]:
    """A mask as uint8 of 0 and 1, (H, W), and whether it held other values than two extremes.

    A pixel is target from half of the file type's largest value on: 128 of 255, 32768 of 65535.
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
    """Whether pixels have more than 8 bits a channel."""
    return image.mode.startswith(("I", "F"))
