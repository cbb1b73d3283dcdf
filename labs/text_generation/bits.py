"""8-bit weights, and torch_xla's support of such types."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_xla
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tpuscope import watch
from tpuscope.monitor.watch import Report

FP8 = torch.float8_e4m3fn


class Quantised(nn.Module):
    """A linear layer with 8-bit weights, converted to the input's type inside the program.

    Each output has a scale of its own: weight ≈ stored × scale.

    Args:
        linear: the layer to be stored in fewer bits.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.int8):
        super().__init__()
        stored, scale = quantise(linear.weight.detach(), dtype)
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """float (…, inputs) → float (…, outputs)."""
        y = F.linear(x, self.stored.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def quantise(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise to fewer bits, with a scale for each row.

    Args:
        weight: float (outputs, inputs).
        dtype: of 8 bits, integer or float.

    Returns:
        The numbers, dtype (outputs, inputs), and the scales, float (outputs,).
    """
    if dtype.is_floating_point:
        scale = weight.abs().amax(1).clamp(min=1e-12) / torch.finfo(dtype).max
        return (weight / scale[:, None]).to(dtype), scale
    scale = weight.abs().amax(1).clamp(min=1e-12) / torch.iinfo(dtype).max
    return (weight / scale[:, None]).round().to(dtype), scale


def quantised(model: PreTrainedModel, dtype: torch.dtype = torch.int8) -> PreTrainedModel:
    """Return a copy of a model on the host, with all linear layers of its blocks in 8 bits."""
    model = copy.deepcopy(model)
    for block in model.model.layers:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Quantised(child, dtype))
    return model


@dataclass(frozen=True)
class Trial:
    """The outcome of an attempt on the device.

    Attributes:
        name: for people.
        outcome: ``"works"``, ``"on the host"`` (no XLA lowering), ``"wrong"`` (other
            numbers than the reference's) or ``"error"``.
        detail: largest difference, as a part of the reference's largest value; what ran on the
            host; the first line of the error.
    """

    name: str
    outcome: str
    detail: str


def attempt(
    name: str, function: Callable[[], Tensor], reference: Tensor, tolerance: float = 0.1
) -> Trial:
    """Try something on the XLA device.

    Args:
        name: for people.
        function: returns a tensor.
        reference: what it should be, on the host.
        tolerance: for the largest difference, as a part of the reference's largest value.
    """
    try:
        with watch() as w:
            result = function()
            torch_xla.sync()
        error = float((result.cpu().float() - reference).abs().max() / reference.abs().max())
    except Exception as raised:  # whatever it is, it is the answer
        line = str(raised).strip().splitlines()[0]
        return Trial(name, "error", f"{type(raised).__name__}: {line}")
    on_host = left_to_the_host(w.report())
    detail = f"off by {100 * error:.1f} %" + f"; {', '.join(on_host)}" * bool(on_host)
    outcome = "wrong" if error > tolerance else "on the host" if on_host else "works"
    return Trial(name, outcome, detail)


def left_to_the_host(report: Report) -> list[str]:
    """Return the host fallbacks, including those of namespaces other than aten."""
    others = (name for name in report.counts.counters if "::" in name)
    others = [name for name in others if not name.startswith(("aten::", "xla::"))]
    return [*report.counts.fallbacks, *others]


def trials(device: torch.device) -> list[Trial]:
    """Try a product of 4×32 inputs with 32×16 weights in every 8-bit form offered."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, generator=generator)
    weight = torch.randn(16, 32, generator=generator)
    linear = nn.Linear(32, 16, bias=False)
    linear.weight.data = weight
    reference = x @ weight.T
    there = x.to(device)
    (small, scale), (float8, scale8) = quantise(weight, torch.int8), quantise(weight, FP8)

    def dynamic() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it goes with torch 2.10
            layer = torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear})
        return layer.to(device)(there)

    def official(**options: bool) -> Tensor:
        # Imported here: it defines an operator when it is imported.
        from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear

        layer = XlaQuantizedLinear(32, 16, is_symmetric=True, **options)
        limit = 7 if options.get("int4_weight") else 127
        scale = weight.abs().amax(1) / limit
        stored = (weight / scale[:, None]).round().to(torch.int8)
        layer.load_quantized_weight(stored.to(device), scale.to(device))
        return layer(there)

    def scaled() -> Tensor:
        one = torch.ones(()).to(device)
        a, b = x.to(FP8).to(device), weight.to(FP8).to(device)
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32)

    a8, b8 = (x * 20).to(torch.int8), (weight * 20).to(torch.int8)
    whole = (a8.int() @ b8.int().T).float()
    integers = a8.to(device), b8.to(device)
    tries = {
        "int8 weights, converted in the program": lambda: Quantised(linear).to(device)(there),
        "int8 weights, not converted": lambda: F.linear(there, small.to(device)) * scale.to(device),
        "FP8 weights (e4m3fn), converted": lambda: Quantised(linear, FP8).to(device)(there),
        "FP8 weights, not converted": lambda: (
            F.linear(there, float8.to(device)) * scale8.to(device)
        ),
        "FP8 × FP8": lambda: x.to(FP8).to(device) @ weight.to(FP8).to(device).T,
        "torch._scaled_mm, FP8": scaled,
        "FP8 of another kind (e4m3fnuz)": lambda: (
            x.to(torch.float8_e4m3fnuz).to(device) @ weight.T.to(device)
        ),
        "int8 × int8": lambda: integers[0] @ integers[1].T,
        "torch._int_mm, int8": lambda: torch._int_mm(*(integers[0], integers[1].T.contiguous())),
        "quantize_dynamic, then .to(device)": dynamic,
        "a quantised tensor, .to(device)": lambda: torch.quantize_per_tensor(
            weight, 0.1, 0, torch.qint8
        ).to(device),
        "XlaQuantizedLinear, int8": official,
        "XlaQuantizedLinear, inputs in int8, too": lambda: official(quantize_activation=True),
        "XlaQuantizedLinear, int4": lambda: official(int4_weight=True),
    }
    integer = ("int8 × int8", "torch._int_mm, int8")
    return [
        attempt(name, function, whole if name in integer else reference)
        for name, function in tries.items()
    ]
