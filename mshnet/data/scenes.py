"""Built-in infrared scenes: small targets over structured clutter, drawn from a seed.

They replace a real data set where none can be downloaded: in the first lesson, the tests, and on a
command line without ``--dataset-dir``. They are not a benchmark: numbers from them tell nothing
about IRSTD-1k.

Lengths are in pixels, radiance is in grey levels (0..255). The model of each term:

============== ==================================================================================
clutter        Gaussian random field whose power falls as 1/f**beta (natural scenes, clouds and
               terrain: beta about 2 to 4), stretched along rows for stratus and waves
clouds         such a field through a smooth step: a low sharpness gives haze, a high one cumulus
sea            flat-sea perspective (row spacing shrinks towards the horizon), waves, and glitter:
               glints crowd a band under the sun
ground         ridge lines from the same field in one dimension, far ridges paler
buildings      blocks with sharp edges, lit windows, masts; some frames have the sun's halo
optics         one Gaussian point-spread function (PSF), sigma 0.55 to 0.95, blurs everything
target         uniform ellipse seen through the PSF, integrated over each pixel in closed form
               (products of error functions), centre and axes at sub-pixel positions. Some
               are point sources
contrast       signal-to-clutter ratio: peak = SCR x local standard deviation of background and
               noise around the target, SCR log-uniform in 6 to 40, peak at most 150
detector       shot noise (variance grows with radiance; normal approximation), read noise, fixed
               column offsets, a few hot pixels, which are not blurred and so differ from targets
============== ==================================================================================

Bright clouds, walls, glints and hot pixels are as bright as the targets or brighter, so no
threshold on grey levels finds the targets; local contrast and shape do.

The mask marks the pixels where a target adds at least half of its own peak, so it always includes
the peak. Every scene has 1 to 4 targets, 1 to 9 pixels across, separate from each other and from
the frame's border.

The random draws depend on ``seed`` and ``index`` alone (PCG64 over a SeedSequence), and their
number never depends on a rounded value. Another CPU's mathematical library may still change a rare
pixel by one grey level.
"""

from __future__ import annotations

import json
import math
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage
from tqdm import tqdm

from tpuscope.files import write_atomic

MIN_SIZE = 32
MASK_FRACTION = 0.5  # a pixel is target where the target adds this fraction of its peak
MAX_TARGETS = 4
GAP = 5  # least free pixels between two targets' masks, and one to the border
SCR_RANGE = (6.0, 40.0)
MAX_PEAK = 150.0  # grey levels; above it a target would be bright enough for a threshold
VERSION = 1  # raise it when the same seed gives other pixels

# Test scenes start here, so a larger training set leaves the test set as it is.
_TEST_START = 1_000_000
_PEAK_HALF = 10  # half width of a target's stamp: 9 pixels across, and the PSF's tail


def render_scene(seed: int, index: int, size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Draw scene ``index`` of the set ``seed``; a pure function of its arguments.

    Args:
        seed: of the set, not negative.
        index: of the scene, not negative.
        size: side in pixels, at least 32; another size is another scene, not a resized one.

    Returns:
        Image (grey levels) and mask (0 or 255), both uint8 (size, size).

    Raises:
        ValueError: an argument is out of range.
    """
    if size < MIN_SIZE:
        raise ValueError(f"size is {size}, scenes need at least {MIN_SIZE} pixels")
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must not be negative, got {seed} and {index}")
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))
    psf_sigma = rng.uniform(0.55, 0.95)
    background, free = _background(rng, size)
    background = ndimage.gaussian_filter(background, psf_sigma, truncate=3.0)
    noise = _detector_noise(rng, background)
    targets, mask = _targets(rng, background, noise, free, psf_sigma)
    frame = background + targets + noise
    _hot_pixels(rng, frame, mask)
    return np.clip(np.rint(frame), 0, 255).astype(np.uint8), mask.astype(np.uint8) * 255


# --- clutter -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _filter(rows: int, cols: int, beta: float, stretch: float) -> np.ndarray:
    """Return amplitudes f**(-beta / 2), (rows, cols // 2 + 1); ``stretch`` widens the field."""
    fy = np.fft.fftfreq(rows)[:, None]
    fx = np.fft.rfftfreq(cols)[None, :] * stretch
    radius = np.hypot(fy, fx)
    radius[0, 0] = np.inf  # no mean
    return radius ** (-beta / 2)


def _field(rng, rows: int, cols: int, beta: float, stretch: float = 1.0) -> np.ndarray:
    """Return a Gaussian random field (rows, cols), power 1/f**beta, mean 0, standard deviation 1.

    It is periodic, which no crop of the frame shows.
    """
    spectrum = np.fft.rfft2(rng.standard_normal((rows, cols)))
    # Rounding beta to a tenth lets all scenes share the cached filters.
    spectrum *= _filter(rows, cols, round(float(beta), 1), stretch)
    field = np.fft.irfft2(spectrum, s=(rows, cols))
    return field / math.sqrt(np.vdot(field, field) / field.size)


def _profile(rng, size: int, beta: float) -> np.ndarray:
    """Return such a field in one dimension: (size,), mean 0, standard deviation 1."""
    return _field(rng, 1, size, beta)[0]


def _step(x: np.ndarray) -> np.ndarray:
    """Return a smooth step from 0 (x <= 0) to 1 (x >= 1)."""
    x = np.clip(x, 0.0, 1.0)
    return x * x * (3.0 - 2.0 * x)


def _background(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return radiance before targets, optics and noise, and where a target may be.

    Both are (size, size): float64 grey levels, bool.
    """
    kinds = (_clouds, _sea, _ground, _city)
    kind = kinds[rng.choice(len(kinds), p=(0.4, 0.2, 0.2, 0.2))]
    return kind(rng, size)


def _sky(rng, size: int, rise: float) -> np.ndarray:
    """Return a clear sky (size, size): darkest at the top, ``rise`` grey levels warmer below."""
    height = np.linspace(0.0, 1.0, size)[:, None]
    column = rng.uniform(20, 90) + rise * height ** rng.uniform(1, 2.5)
    return np.repeat(column, size, axis=1)


def _add_clouds(rng, sky: np.ndarray, sharpness: float, cover: float, warmth: float) -> np.ndarray:
    """Return ``sky`` with one cloud deck; ``cover`` is the field's value where cloud begins."""
    size = len(sky)
    stretch = float(rng.choice((1.0, 1.4, 2.0, 3.0)))
    field = _field(rng, size, size, rng.uniform(2.8, 3.6), stretch)
    # Clouds gather towards one border, as over a horizon.
    tilt = rng.uniform(-1.5, 2.0) * np.linspace(-1, 1, size)[:, None]
    tilt = tilt + rng.uniform(-0.8, 0.8) * np.linspace(-1, 1, size)[None, :]
    depth = field + tilt - cover
    shade = 1.0 + 0.12 * np.clip(depth, 0.0, 2.0)
    if sharpness > 0.8:  # haze has no billows
        shade += 0.13 * _field(rng, size, size, rng.uniform(2.4, 3.2))
    return sky + warmth * shade * _step(depth * sharpness)


def _add_halo(rng, frame: np.ndarray) -> np.ndarray:
    """Return ``frame`` with the sun behind haze: a wide glow about a centre near the border."""
    size = len(frame)
    y, x = np.mgrid[:size, :size] / size
    cy, cx = rng.uniform(0.0, 1.0), rng.choice((-0.05, 1.05))
    distance = np.hypot(y - cy, x - cx)
    return frame + rng.uniform(80, 190) / (1.0 + (distance / rng.uniform(0.08, 0.25)) ** 2)


def _clouds(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sky seen from below: haze, then up to two decks of cloud, hard-edged or soft."""
    frame = _sky(rng, size, rise=rng.uniform(0, 40))
    warmth = rng.uniform(10, 50)
    frame = _add_clouds(rng, frame, rng.uniform(0.3, 0.8), rng.uniform(-1, 0.5), warmth)
    if rng.random() < 0.8:
        warmth = rng.uniform(70, 160)
        frame = _add_clouds(rng, frame, rng.uniform(0.8, 4.0), rng.uniform(0.2, 1.2), warmth)
    if rng.random() < 0.2:
        frame = _add_halo(rng, frame)
    return frame, np.ones((size, size), bool)


def _line(rng, size: int, low: float, high: float, slope: float) -> np.ndarray:
    """Return the row of a slightly tilted horizon at each column, float64 (size,)."""
    tilt = rng.uniform(-slope, slope) * np.linspace(-0.5, 0.5, size)
    return size * (rng.uniform(low, high) + tilt)


def _sea(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sea up to a horizon: swell that shrinks with distance, glitter, cloud above."""
    frame = _add_clouds(
        rng,
        _sky(rng, size, rise=rng.uniform(10, 60)),
        rng.uniform(0.5, 3.0),
        rng.uniform(0.0, 1.0),
        rng.uniform(30, 130),
    )
    line = _line(rng, size, 0.15, 0.55, slope=0.06)
    depth = np.arange(size)[:, None] - line[None, :]  # rows below the horizon
    near = np.clip(depth / size, 0.0, None)
    water = rng.uniform(35, 130) + rng.uniform(-30, 45) * near + _swell(rng, near)
    glints, glitter = _glitter(rng, near)
    frame = np.where(depth > 0, water + glints, frame)
    if rng.random() < 0.5:  # a far coast
        coast = size * rng.uniform(0.0, 0.03) * np.clip(_profile(rng, size, 2.2) + 0.4, 0, None)
        shore = (depth <= 0) & (depth > -coast)
        frame = np.where(shore, rng.uniform(50, 150), frame)
    return frame, ~glitter


def _swell(rng, near: np.ndarray) -> np.ndarray:
    """Return waves (size, size) in grey levels; ``near``: distance below the horizon / size."""
    size = len(near)
    waves = _field(rng, size, size, rng.uniform(1.6, 2.4), stretch=float(rng.choice((4.0, 7.0))))
    # Flat sea: a row at depth d below the horizon looks 1/d away, so take rows at 1/d.
    away = 1.0 / (near + 0.08)
    rows = np.rint(away * size * 0.6).astype(np.intp) % size
    far_to_near = waves[rows, np.arange(size)[None, :]]
    return rng.uniform(4, 12) * far_to_near * (0.35 + np.sqrt(near))


def _glitter(rng, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sun glints, grey levels (size, size), and the band where they are dense, bool."""
    size = len(near)
    dice = rng.random((size, size))
    strength = rng.uniform(60, 200) * rng.random((size, size))
    centre, width = rng.uniform(0.1, 0.9) * size, rng.uniform(0.03, 0.12) * size
    sunny = rng.random() < 0.6
    band = np.exp(-0.5 * ((np.arange(size)[None, :] - centre) / width) ** 2) * (near > 0)
    lit = (dice < 0.18 * band) & sunny
    glints = np.where(lit, strength, 0.0)
    glints = np.maximum(glints, 0.7 * np.roll(glints, 1, axis=1))  # glints are wide, not tall
    return glints, (band > 0.05) & sunny


def _ground(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ridges under a sky, or ground seen from above: fields, warm patches, a track."""
    looking_down = rng.random() < 0.3
    frame = _sky(rng, size, rise=rng.uniform(10, 60))
    if rng.random() < 0.6:
        warmth = rng.uniform(30, 120)
        frame = _add_clouds(rng, frame, rng.uniform(0.5, 3), rng.uniform(0.2, 1.2), warmth)
    rows = np.arange(size)[:, None]
    tone = rng.uniform(60, 110)
    layers = 1 if looking_down else int(rng.integers(1, 4))
    top = -0.5 if looking_down else rng.uniform(0.25, 0.55)
    for layer in range(layers):
        line = size * (top + 0.14 * layer + 0.05 * _profile(rng, size, rng.uniform(2.2, 3)))
        nearness = (layer + 1) / layers
        land = tone + 45 * nearness + _texture(rng, size) * (0.3 + 0.7 * nearness)
        frame = np.where(rows > line[None, :], land, frame)
    if looking_down or rng.random() < 0.3:
        frame = _add_track(rng, frame, top)
    return frame, np.ones((size, size), bool)


def _texture(rng, size: int) -> np.ndarray:
    """Return soil and scrub (size, size) in grey levels: rough cover with warm bare patches."""
    rough = rng.uniform(3, 9) * _field(rng, size, size, rng.uniform(1.6, 2.4))
    patches = _step(2.5 * (_field(rng, size, size, 3.0) - rng.uniform(0.3, 1.2)))
    return rough + rng.uniform(15, 70) * patches


def _add_track(rng, frame: np.ndarray, top: float) -> np.ndarray:
    """Return ``frame`` with a road or river: a winding bright line, 2 to 5 pixels wide."""
    size = len(frame)
    rows = np.arange(size)
    path = size * (rng.uniform(0.2, 0.8) + 0.12 * _profile(rng, size, 4.0))
    path = path + rng.uniform(-0.7, 0.7) * (rows - size / 2)
    inside = np.abs(rows[None, :] - path[:, None]) < rng.uniform(1, 2.5)
    inside &= (rows > (top + 0.25) * size)[:, None]
    return np.where(inside, frame + rng.uniform(30, 80), frame)


def _city(rng, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Roofs and walls under a sky; targets stay in the sky, as a lit window looks like one."""
    frame = _sky(rng, size, rise=rng.uniform(0, 50))
    warmth = rng.uniform(20, 130)
    frame = _add_clouds(rng, frame, rng.uniform(0.4, 3), rng.uniform(0, 1.2), warmth)
    if rng.random() < 0.3:
        frame = _add_halo(rng, frame)
    built = np.zeros((size, size), bool)
    for _ in range(rng.integers(1, 6)):
        _add_building(rng, frame, built)
    return frame, ~built


def _add_building(rng, frame: np.ndarray, built: np.ndarray) -> None:
    """Draw one block from the lower border, with windows, a warm roof edge and maybe a mast."""
    size = len(frame)
    width = max(4, int(size * rng.uniform(0.08, 0.3)))
    left = int(rng.integers(-width // 2, size - width // 2))
    top, slant = size * rng.uniform(0.4, 0.85), rng.uniform(-0.25, 0.25)
    wall, lit, edge = rng.uniform(25, 210), rng.uniform(-40, 60), rng.uniform(20, 70)
    pitch, has_windows = int(rng.integers(6, 13)), rng.random() < 0.6
    mast, has_mast = size * rng.uniform(0.05, 0.15), rng.random() < 0.4

    cols = np.arange(max(left, 0), min(left + width, size))
    across = (cols - left)[None, :]
    down = np.floor(np.arange(size)[:, None] - top - slant * across)  # rows below the roof
    window = (across % pitch > pitch // 2) & (down % pitch > pitch // 2) & (down > pitch)
    face = wall + lit * (window & has_windows) + 12 * (across / width - 0.5) + edge * (down < 2)
    part = np.s_[:, cols[0] : cols[-1] + 1]
    np.copyto(frame[part], face, where=down >= 0)
    built[part] |= down >= 0
    if has_mast:
        foot = min(int(top + slant * width / 2) + 1, size)
        pole = np.s_[int(max(foot - mast, 0)) : foot, cols[len(cols) // 2]]
        frame[pole] = wall
        built[pole] = True


# --- targets -------------------------------------------------------------------------------------


def _targets(rng, background, noise, free, psf_sigma) -> tuple[np.ndarray, np.ndarray]:
    """Return radiance of 1 to 4 targets, float64 (size, size), and their mask, bool."""
    size = len(background)
    total = np.zeros((size, size))
    mask = np.zeros((size, size), bool)
    count = 1 + int(rng.choice(MAX_TARGETS, p=(0.55, 0.25, 0.13, 0.07)))
    for _ in range(count):
        stamp = _target_stamp(rng, psf_sigma)
        scr = math.exp(rng.uniform(*np.log(SCR_RANGE)))
        spots = rng.random((40, 2))
        half = _half_extent(stamp)
        place = _choose_place(size, spots, half, mask, free, background, noise, scr)
        if place is None:  # a small frame can be full; the first target always fits
            continue
        row, col, peak = place
        _paste(total, peak * stamp, row, col)
        _paste(mask, stamp >= MASK_FRACTION, row, col)
    return total, mask


def _target_stamp(rng, psf_sigma: float) -> np.ndarray:
    """One target of peak 1, float64 (21, 21): points over an ellipse, each the PSF per pixel."""
    # Most targets are small; log-uniform gives each octave of lengths its share.
    length = math.exp(rng.uniform(math.log(2.5), math.log(8.5)))
    if rng.random() < 0.15:
        length = 0.4  # a point source
    breadth = length * rng.uniform(0.5, 1.0)
    angle = rng.uniform(0, math.pi)
    centre = rng.uniform(-0.5, 0.5, size=2)
    grid = np.arange(-9, 10) * 0.45
    v, u = (a.ravel() for a in np.meshgrid(grid, grid, indexing="ij"))
    inside = (2 * u / length) ** 2 + (2 * v / breadth) ** 2 <= 1
    u, v = u[inside], v[inside]
    rows = centre[0] + u * math.sin(angle) + v * math.cos(angle)
    cols = centre[1] + u * math.cos(angle) - v * math.sin(angle)
    stamp = _pixel_psf(rows, psf_sigma).T @ _pixel_psf(cols, psf_sigma)
    return stamp / stamp.max()


_erf = np.frompyfunc(math.erf, 1, 1)


def _pixel_psf(at: np.ndarray, sigma: float) -> np.ndarray:
    """Return the share of a Gaussian at each of ``at`` (n,) in each pixel of a stamp: (n, 21)."""
    edges = np.arange(-_PEAK_HALF, _PEAK_HALF + 2) - 0.5
    z = (edges[None, :] - at[:, None]) / (sigma * math.sqrt(2))
    return 0.5 * np.diff(_erf(z).astype(np.float64), axis=1)


def _half_extent(stamp: np.ndarray) -> int:
    """Return pixels from the stamp's centre to the furthest pixel of its mask, along an axis."""
    return int(np.abs(np.argwhere(stamp >= MASK_FRACTION) - _PEAK_HALF).max())


def _choose_place(
    size: int, spots, half: int, mask, free, background, noise, scr: float
) -> tuple[int, int, float] | None:
    """Return the first free spot where the peak stays in range: (row, col, peak).

    If there is none, return the spot that would be clipped least, at the peak the range allows;
    None if no spot is free.
    """
    border = half + min(GAP, size // 8)
    rows, cols = (border + spots * (size - 2 * border)).astype(np.intp).T
    best, best_excess = None, math.inf
    for only_free in (True, False):
        for row, col in zip(rows.tolist(), cols.tolist(), strict=True):
            if only_free and not _window(free, row, col, half + 3).all():
                continue
            if _window(mask, row, col, 2 * half + GAP).any():
                continue
            level, spread = _surroundings(background, noise, row, col, half)
            room = min(MAX_PEAK, 245.0 - level)
            excess = scr * spread - room
            if excess <= 0:
                return row, col, scr * spread
            if excess < best_excess:
                best, best_excess = (row, col, max(room, 10.0)), excess
        if best is not None:
            break
    return best


def _window(array: np.ndarray, row: int, col: int, half: int) -> np.ndarray:
    return array[max(row - half, 0) : row + half + 1, max(col - half, 0) : col + half + 1]


def _surroundings(background, noise, row: int, col: int, half: int) -> tuple[float, float]:
    """Return the mean background around a place, and the deviation of background with noise."""
    around = half + 5
    level = _window(background, row, col, around)
    return float(level.mean()), float((level + _window(noise, row, col, around)).std())


def _paste(canvas: np.ndarray, stamp: np.ndarray, row: int, col: int) -> None:
    """Add (for bool: unite) a stamp centred at a pixel, cropped to the frame."""
    target = _window(canvas, row, col, _PEAK_HALF)
    top, left = max(_PEAK_HALF - row, 0), max(_PEAK_HALF - col, 0)
    target += stamp[top : top + target.shape[0], left : left + target.shape[1]]


# --- detector ------------------------------------------------------------------------------------


def _detector_noise(rng, background: np.ndarray) -> np.ndarray:
    """Return shot, read and column noise (size, size) in grey levels.

    A target's own shot noise is omitted, so that its contrast is exactly the drawn one.
    """
    size = len(background)
    gain = rng.uniform(0.005, 0.03)  # grey levels**2 of variance per grey level of signal
    read = rng.uniform(0.6, 2.0)
    variance = read**2 + gain * np.clip(background, 0, 255)
    columns = rng.uniform(0.2, 1.0) * rng.standard_normal(size)
    return np.sqrt(variance) * rng.standard_normal((size, size)) + columns[None, :]


def _hot_pixels(rng, frame: np.ndarray, mask: np.ndarray) -> None:
    """Raise a few single pixels of ``frame`` by 60 to 200 grey levels, away from targets."""
    size = len(frame)
    count = int(rng.integers(1, 2 + size * size // 8192))
    rows, cols = rng.integers(0, size, (2, count))
    jump = rng.uniform(60, 200, count)
    for row, col, level in zip(rows.tolist(), cols.tolist(), jump.tolist(), strict=True):
        if not _window(mask, row, col, 3).any():
            frame[row, col] += level


# --- a set on disk -------------------------------------------------------------------------------


def write_scenes(
    folder: str | Path,
    train: int = 400,
    test: int = 100,
    size: int = 256,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Write a set of scenes in the common layout.

    ``images/NAME.png`` and ``masks/NAME.png`` (grey, 8 bit), ``trainval.txt`` and ``test.txt``
    (one name a line), ``scenes.json`` (the arguments). An existing set is left alone, an
    interrupted one is completed. The test scenes do not depend on ``train``.

    Args:
        folder: new, empty, or with scenes of the same arguments.
        train: number of training scenes.
        test: number of test scenes.
        size: side in pixels.
        seed: of the set.
        progress: show a bar.

    Returns:
        The folder.

    Raises:
        ValueError: the folder holds anything else, or a number is out of range.
        OSError: the disk is full or gone.
    """
    folder = Path(folder)
    if train < 1 or test < 1:
        raise ValueError(f"train and test must be at least 1, got {train} and {test}")
    about = {"version": VERSION, "train": train, "test": test, "size": size, "seed": seed}
    render_scene(seed, 0, size)  # finds arguments out of range before anything is written
    _claim(folder, about)
    lists = {
        "trainval.txt": {f"train_{i:05d}": i for i in range(train)},
        "test.txt": {f"test_{i:05d}": _TEST_START + i for i in range(test)},
    }
    missing = _missing(folder, lists)
    for name, index in tqdm(missing.items(), "scenes", disable=not progress or not missing):
        image, mask = render_scene(seed, index, size)
        _write_png(folder / "images" / f"{name}.png", image)
        _write_png(folder / "masks" / f"{name}.png", mask)
    for file, names in lists.items():  # last: a reader that finds the lists finds every file
        if not (folder / file).exists():
            write_atomic(folder / file, "\n".join(names) + "\n")
    return folder


def _claim(folder: Path, about: dict) -> None:
    """Mark the folder as this set's; ValueError if it holds anything else."""
    card = folder / "scenes.json"
    if card.is_file():
        try:
            found = json.loads(card.read_text())
        except ValueError:
            found = "an unreadable scenes.json"
        if found != about:
            raise ValueError(
                f"{folder} holds other scenes: {found}, not {about}; "
                "name another folder or delete this one"
            )
        return
    # The card is written first, so before it only its own unfinished form can be here.
    if folder.exists() and (
        not folder.is_dir() or any(not f.name.startswith(".scenes.json") for f in folder.iterdir())
    ):
        raise ValueError(f"{folder} is not empty and holds no scenes; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(card, json.dumps(about, indent=1) + "\n")


def _missing(folder: Path, lists: dict) -> dict:
    """Return name and index of the scenes whose image or mask is missing or empty."""
    found = []
    for part in ("images", "masks"):
        (folder / part).mkdir(exist_ok=True)
        with os.scandir(folder / part) as files:
            found.append({file.name for file in files if file.stat().st_size})
    return {
        name: index
        for names in lists.values()
        for name, index in names.items()
        if not all(f"{name}.png" in there for there in found)
    }


def _write_png(path: Path, pixels: np.ndarray) -> None:
    """Write under another name, then rename: a PNG that exists is complete.

    Unlike :func:`~tpuscope.files.write_atomic` it does not wait for the disk, which would take a
    third of the time of a set; a file that a power cut emptied is drawn again.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    # Noise hardly compresses: half the time of the default level for a sixth more bytes.
    Image.fromarray(pixels).save(part, "PNG", compress_level=3)
    os.replace(part, path)
