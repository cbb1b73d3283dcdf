"""Compare enlarged frames with the true ones: PSNR and SSIM, against bicubic and nearest."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch.nn import functional as F

from .frames import shrunk

Method = Callable[[np.ndarray], np.ndarray]  # uint8 (H, W) → uint8 (s·H, s·W)


def nearest(frame: np.ndarray, scale: int) -> np.ndarray:
    """Repeat each pixel s × s times, uint8."""
    return frame.repeat(scale, 0).repeat(scale, 1)


def bicubic(frame: np.ndarray, scale: int) -> np.ndarray:
    """Enlarge by PyTorch's bicubic interpolation (a = -0.75, no aligned corners), uint8."""
    pixels = torch.from_numpy(frame.astype(np.float32))[None, None]
    large = F.interpolate(pixels, scale_factor=scale, mode="bicubic", align_corners=False)
    return np.rint(large[0, 0].numpy().clip(0, 255)).astype(np.uint8)


def compare(frames: Sequence[np.ndarray], scale: int, **methods: Method) -> dict[str, dict]:
    """Shrink frames, enlarge them again in several ways, and compare with the originals.

    Args:
        frames: uint8 (H, W), sides multiples of the scale.
        scale: 2 or 4.
        methods: beside nearest and bicubic, by name.

    Returns:
        By method ``psnr`` in dB and ``ssim``, means over the frames of scikit-image's functions on
        8-bit grey levels; ``psnr_gain`` is the mean difference to bicubic, ``psnr_error`` its
        standard error (NaN for one frame), and ``better`` the share of frames where it is positive.
    """
    ways: dict[str, Method] = {
        "nearest": lambda low: nearest(low, scale),
        "bicubic": lambda low: bicubic(low, scale),
        **methods,
    }
    scores: dict[str, list] = {name: [] for name in ways}
    for frame in frames:
        low = shrunk(frame, scale)
        for name, enlarge in ways.items():
            scores[name].append(_scores(frame, enlarge(low)))
    base = np.array(scores["bicubic"])[:, 0]
    return {name: _summary(np.array(values), base) for name, values in scores.items()}


def _scores(truth: np.ndarray, made: np.ndarray) -> tuple[float, float]:
    with np.errstate(divide="ignore"):  # a perfect frame has an infinite PSNR
        psnr = peak_signal_noise_ratio(truth, made, data_range=255)
    return psnr, structural_similarity(truth, made, data_range=255)


def _summary(values: np.ndarray, base: np.ndarray) -> dict[str, float]:
    gain = values[:, 0] - base
    count = len(gain)
    error = gain.std(ddof=1) / np.sqrt(count) if count > 1 else float("nan")
    return {
        "psnr": float(values[:, 0].mean()),
        "ssim": float(values[:, 1].mean()),
        "psnr_gain": float(gain.mean()),
        "psnr_error": float(error),
        "better": float((gain > 0).mean()),
    }


def table(scores: dict[str, dict]) -> str:
    """Return a text table: a line for each method."""
    lines = ["method         PSNR dB    SSIM   against bicubic      better on"]
    for name, s in scores.items():
        gain = f"{s['psnr_gain']:+.2f} ± {s['psnr_error']:.2f} dB" if name != "bicubic" else ""
        share = f"{100 * s['better']:.0f} % of frames" if name != "bicubic" else ""
        lines.append(f"{name:<14} {s['psnr']:7.2f}  {s['ssim']:.4f}   {gain:<19}  {share}".rstrip())
    return "\n".join(lines)
