"""The set-up check: packages, the device, its operations, loading a model."""

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mshnet.training import checkpoint
from mshnet.training.backend import Backend
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError

from .networks import Bicubic
from .training import GENERATOR, Settings, generator_of, load_generator, open_backend

NEEDED = ("torch", "numpy", "scikit-image", "pillow", "matplotlib", "tqdm")
OPTIONAL = {"torch_xla": "for TPUs and XLA", "torchvision": "for --vgg"}
# Of the largest value: a TPU multiplies float32 in bfloat16 passes, which keep 8 bits.
TOLERANCE = 0.02


class Row(NamedTuple):
    """One check: its name, whether it works, and the finding."""

    name: str
    fine: bool
    text: str


def check(device: str = "auto") -> list[Row]:
    """Try everything that the lab uses, in order; skip checks that depend on a failed one.

    Args:
        device: as of the training.
    """
    rows = [_package(name) for name in NEEDED]
    rows += [_package(name, purpose) for name, purpose in OPTIONAL.items()]
    try:
        backend = open_backend(device)
    except (RequestError, runtime.XlaUnavailable) as error:
        return [*rows, Row("device", False, str(error))]
    rows.append(Row("device", True, backend.label))
    rows += [_operation(name, function, backend) for name, function in _operations().items()]
    counted = backend.counters()
    if backend.device.type == "xla":
        fallbacks = f"{counted.fallbacks} operations ran on the host instead"
        rows.append(Row("fallbacks", counted.fallbacks == 0, fallbacks))
    return [*rows, _model(backend)]


def table(rows: list[Row]) -> str:
    """Return a text table: a line for each row."""
    lines = [f"{'ok  ' if row.fine else 'FAIL'}  {row.name:<18}{row.text}" for row in rows]
    failed = sum(not row.fine for row in rows)
    return "\n".join([*lines, f"{failed} failed" if failed else "everything works here"])


def _package(name: str, optional: str = "") -> Row:
    try:
        return Row(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Row(name, bool(optional), f"not installed ({optional or 'needed'})")


def _operations() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the operations of the networks: functions from (2, 4, 8, 8) to a tensor."""
    kernel = torch.linspace(-1, 1, 36).view(4, 1, 3, 3)
    slope = torch.full((4,), 0.25)
    bicubic = Bicubic(2)
    return {
        "matrix product": lambda x: x @ x.transpose(2, 3),
        "depthwise conv": lambda x: F.conv2d(x, kernel.to(x.device), padding=1, groups=4),
        "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
        "PReLU": lambda x: F.prelu(x, slope.to(x.device)),
        "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
        "bicubic": lambda x: bicubic.to(x.device)(x[:, :1]),
        "softplus": F.softplus,
    }


def _operation(name: str, function: Callable[[Tensor], Tensor], backend: Backend) -> Row:
    """Compare forward and backward with the host's."""
    values = torch.linspace(-2, 2, 512).view(2, 4, 8, 8)
    try:
        here = _forward_and_gradient(function, values.clone())
        there = _forward_and_gradient(function, backend.to_device(values))
    except RuntimeError as error:  # a device without this operation: what the check is to tell
        return Row(name, False, (str(error).splitlines() or ["no message"])[0])
    error = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(there, here, strict=True)
    )
    return Row(name, error < TOLERANCE, f"differs from the host's by {error:.1e} of the maximum")


def _forward_and_gradient(function: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    (y * y).sum().backward()
    return y.detach().cpu(), x.grad.cpu()


def _model(backend: Backend) -> Row:
    """Save a generator, load it, and compare what both make of a frame."""
    settings = Settings(width=8, blocks=1)
    generator = generator_of(settings).eval()
    low = torch.rand(1, 1, 16, 16)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / GENERATOR
        content = {"generator": generator.state_dict(), "settings": asdict(settings)}
        checkpoint.save(content, path)
        loaded, _ = load_generator(path)
        backend.move(loaded)
        error = float((loaded(backend.to_device(low)).cpu() - generator(low)).abs().max())
    return Row("load a model", error < TOLERANCE, f"differs from the saved one by {error:.1e}")
