"""Training augmentation and test resizing, on 8-bit arrays.

The distribution is the official one: horizontal flip (p 0.5), long side resized to 0.5 to 2.0 times
the base size, padding with black up to the crop size, random crop, Gaussian blur (p 0.5, radius
below 1 px). All randomness comes from the generator argument, so a sample depends on (seed, epoch,
index) and not on the worker that makes it.
"""

import numpy as np
from PIL import Image, ImageFilter

BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST


def augment(
    image: np.ndarray,
    mask: np.ndarray,
    base_size: int,
    crop_size: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return one random training sample.

    Args:
        image: uint8, (H, W) or (H, W, 3).
        mask: uint8 of 0 and 1, (H, W).
        base_size: pixels; the long side becomes 0.5 to 2.0 times this.
        crop_size: pixels; side of the result.
        rng: source of all randomness.

    Returns:
        image (crop_size, crop_size[, 3]) and mask (crop_size, crop_size), both uint8.
    """
    picture, target = Image.fromarray(image), Image.fromarray(mask)
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        target = target.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    long_side = int(rng.integers(base_size // 2, base_size * 2, endpoint=True))
    scale = long_side / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    left, top = (
        int(rng.integers(0, max(side - crop_size, 0), endpoint=True)) for side in (width, height)
    )
    # Cropping past the right and bottom edge pads with 0, which is black and background.
    box = (left, top, left + crop_size, top + crop_size)
    picture = picture.resize((width, height), BILINEAR).crop(box)
    target = target.resize((width, height), NEAREST).crop(box)

    if rng.random() < 0.5:
        picture = picture.filter(ImageFilter.GaussianBlur(radius=rng.random()))
    return np.asarray(picture), np.asarray(target)


def resize(image: np.ndarray, mask: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Resize a test sample to size × size: bilinear for the image, nearest for the mask.

    Args:
        image: uint8, (H, W) or (H, W, 3).
        mask: uint8, (H, W).
        size: pixels.
    """
    return (
        np.asarray(Image.fromarray(image).resize((size, size), BILINEAR)),
        np.asarray(Image.fromarray(mask).resize((size, size), NEAREST)),
    )
