"""Bilinear interpolation with aligned corners, in the form that suits each device."""

import torch
from torch import Tensor
from torch.nn import functional as F


def upsample(x: Tensor, scale: int) -> Tensor:
    """Enlarge by a whole factor: (B, C, H, W) → (B, C, scale·H, scale·W).

    ``F.interpolate`` on CPUs, :func:`by_matrices` elsewhere.
    """
    if x.device.type == "cpu":
        return F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=True)
    return by_matrices(x, scale)


def by_matrices(x: Tensor, scale: int) -> Tensor:
    """Enlarge by two small matrix products, with the values of ``F.interpolate``.

    The backward pass of ``F.interpolate`` has no XLA lowering off TPU, and is not deterministic on
    CUDA. Interpolation is linear and separable, so it is ``A @ x @ Bᵀ``. (A TPU multiplies float32
    matrices in bfloat16 unless the precision is set to "highest".)
    """
    height, width = x.shape[-2:]
    vertical = _matrix(height, scale, x)
    horizontal = _matrix(width, scale, x)
    return vertical @ (x @ horizontal.T)


def _matrix(size: int, scale: int, like: Tensor) -> Tensor:
    """Return linear-interpolation weights, (size·scale, size).

    Built inside the graph: a compiler folds it to a constant, and there is no cache that could
    hold tensors of another device.
    """
    out = size * scale
    rows = torch.arange(out, device=like.device, dtype=torch.float32)
    columns = torch.arange(size, device=like.device, dtype=torch.float32)
    positions = rows * ((size - 1) / (out - 1))
    weights = (1 - (positions[:, None] - columns[None, :]).abs()).clamp(min=0)
    return weights.to(like.dtype)


def double(x: Tensor, f: int) -> Tensor:
    """Double the size by transposed convolutions, the form that moves the fewest bytes on a TPU.

    Matrix products would need another memory layout than the convolutions before and after.

    Along an axis with n places, place 2i of the result is x[i] + t·(x[i-1] - x[i]) and place 2i + 1
    is x[i] + s·(x[i+1] - x[i]), where t and s are linear in i. With z[i] = p[i]·x[i], p linear in
    i, that is one transposed convolution of x and z, with the same four weights everywhere:
    :func:`_axis` has them.

    Args:
        x: (B, C·g, H, W/g), g = f/2 columns stored as channels
            (:mod:`mshnet.space_to_depth`), or none.
        f: columns folded in the result, 1 for none.

    Returns:
        (B, C·f, 2H, 2W/f).
    """
    g = max(1, f // 2)
    lanes, h, w = x.shape[1:]
    (down, rows), (along, columns) = _axis(h, x), _axis(w * g, x)
    down = down.view(1, 1, h, 1)
    if f == 1:
        products = torch.cat([_at(x, p) for p in (None, along, down, down * along)], 1)
        taps = _each((rows[:, None, :, None] * columns[None, :, None]).flatten(0, 1), lanes)
        return F.conv_transpose2d(products, taps.to(x.dtype), stride=2, padding=1)
    taps = _each(rows[..., None], lanes)
    x = torch.cat([x, _at(x, down)], 1)
    x = F.conv_transpose2d(x, taps.to(x.dtype), stride=(2, 1), padding=(1, 0))
    along = along.view(w, g).T.repeat(lanes // g, 1).view(1, lanes, 1, w)
    x = torch.cat([x, _at(x, along)], 1)
    return F.conv2d(x, _folded(columns, lanes // g, g).to(x.dtype), padding=(0, 1))


def _at(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else (x * places).to(x.dtype)


def _axis(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return p, (n,), of an axis of n places, and the weights of x and of p·x, (2, 4).

    Place i adds to places 2i - 1, 2i, 2i + 1 and 2i + 2 of the doubled axis. What lies outside is
    zero in x and in p·x, and would have the share 0 in the result anyway. p is 0 in the middle, so
    that in bfloat16 it has the least to round.
    """
    places = (torch.arange(n, device=like.device, dtype=torch.float32) - (n - 1) / 2) / (2 * n - 1)
    to = torch.arange(4, device=like.device)
    near, far = (3 * n - 1) / (4 * n - 2), (n + 1) / (4 * n - 2)
    inner = ((to == 1) | (to == 2)).to(torch.float32)
    right = (to >= 2).to(torch.float32)
    return places, torch.stack([inner * (near - far) + far, right * 2 - 1])


def _each(taps: Tensor, lanes: int) -> Tensor:
    """Repeat a transposed kernel's weights for each channel: (N, R, S) → (N·C, C, R, S)."""
    same = torch.eye(lanes, device=taps.device)[None, :, :, None, None]
    return (taps[:, None, None] * same).flatten(0, 1)


def _folded(taps: Tensor, channels: int, g: int) -> Tensor:
    """Return a kernel that doubles folded columns: taps (2, 4) → (C·2g, 2·C·g, 1, 3)."""
    out = torch.arange(2 * g, device=taps.device).view(-1, 1, 1)
    column = torch.arange(g, device=taps.device).view(1, -1, 1)
    group = torch.arange(-1, 2, device=taps.device).view(1, 1, -1)
    to = out - 2 * (column + g * group) + 1  # which of the four
    of = (to[..., None] == torch.arange(4, device=taps.device)).to(taps.dtype)
    lines = (of[None] * taps[:, None, None, None]).sum(-1)  # (2, 2g, g, 3)
    same = torch.eye(channels, device=taps.device).view(channels, 1, 1, channels, 1, 1)
    lines = lines.transpose(0, 1).unsqueeze(2).unsqueeze(0) * same
    return lines.flatten(2, 4).flatten(0, 1).unsqueeze(2)
