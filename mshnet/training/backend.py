"""What differs between devices, and nothing else: one small object chosen at start-up."""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..errors import RequestError
from ..xla import runtime
from ..xla.runtime import Counters
from .folder import require_writable

WHERE_EIGHT = (
    "Colab's TPUs have 1 core; Kaggle's TPU v5e-8 has 8, and so has a Cloud TPU v5litepod-8"
)


class Backend:
    """Eager PyTorch on one device; the base of the others.

    Attributes:
        device: where the model and the batches live.
        label: for people, such as ``"cuda: NVIDIA L4"``.
    """

    def __init__(self, device: torch.device, label: str, precision: str = "fp32"):
        self.device = device
        self.label = label
        self.precision = precision

    def place(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], state: dict | None
    ) -> Optimizer:
        """Move the model to the device and give it an optimizer.

        Args:
            model: on the host; moved in place.
            make_optimizer: from a model to its optimizer.
            state: the optimizer's state to continue from, or None for a fresh one.
        """
        # The state always arrives from the host: made on an XLA device, its zeros would be part
        # of the first step's graph and the second step would be another graph.
        state = state or make_optimizer(model).state_dict()
        _move(model, self.device)
        optimizer = make_optimizer(model)
        optimizer.load_state_dict(state)
        return optimizer

    def feed(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        """The loader's batches, on the device."""
        for batch in loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def put(self, tensor: Tensor) -> Tensor:
        """One host tensor on the device, as data.

        At least one dimension: torch_xla makes a 0-dimensional 0 or 1 a constant of the graph,
        and its other values then need another graph.
        """
        assert tensor.dim() > 0, "a 0-dimensional tensor may become a constant of the graph"
        return tensor.to(self.device)

    def autocast(self) -> AbstractContextManager:
        """Context of the forward pass: bfloat16 where asked for."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def end_step(self) -> None:
        """Where a step ends."""

    def counters(self) -> Counters:
        """Compilations, fallbacks and host reads so far; zeros where nothing is compiled."""
        return Counters()


class XlaBackend(Backend):
    """One XLA core: a TPU, or the CPU under the same compiler front."""

    def __init__(self, platform: str, precision: str = "fp32", compile_cache: str | None = None):
        runtime.select_platform(platform)
        if compile_cache:
            runtime.enable_compile_cache(compile_cache)
        super().__init__(runtime.device(), runtime.describe(), precision)

    def feed(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        return runtime.DeviceFeed(loader, self.device)

    def end_step(self) -> None:
        runtime.end_step()

    def counters(self) -> Counters:
        return runtime.counters()


def _move(model: nn.Module, device: torch.device) -> None:
    """Move the model, except batch norm's counts of batches, which nothing computes with.

    As 0-dimensional zeros they would be constants of the first XLA step and data of the second:
    one more compilation.
    """
    counted = [m for m in model.modules() if getattr(m, "num_batches_tracked", None) is not None]
    counts = [module.num_batches_tracked for module in counted]
    model.to(device)
    for module, count in zip(counted, counts, strict=True):
        module.num_batches_tracked = count


def choose(
    device: str = "auto",
    num_cores: int = 1,
    precision: str = "fp32",
    compile_cache: str | None = None,
) -> Backend:
    """The backend for a request.

    Args:
        device: ``"auto"`` (TPU, then CUDA, then CPU), ``"tpu"``, ``"cuda"`` or ``"cpu"``. With
            ``PJRT_DEVICE=CPU`` set, ``"tpu"`` means XLA on the CPU.
        num_cores: cores to train on.
        precision: ``"fp32"`` or ``"bf16"`` (autocast).
        compile_cache: folder for compiled programs; XLA only.

    Raises:
        RequestError: the device is not there, or has fewer cores.
    """
    try:
        # Not asked for --device cpu or cuda: they are the way out where torch_xla is broken.
        chips = runtime.tpu_chips() if device in ("auto", "tpu") else 0
        if device == "auto":
            device = "tpu" if chips else "cuda" if torch.cuda.is_available() else "cpu"
        if device == "tpu":
            return _xla(chips, num_cores, precision, compile_cache)
    except runtime.XlaUnavailable as error:
        raise RequestError(str(error)) from error
    if num_cores > 1:
        raise RequestError(
            f"--num-cores {num_cores}: --device {device} trains on 1; several cores are a TPU's "
            f"({WHERE_EIGHT})"
        )
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RequestError(
                "--device cuda: PyTorch finds no CUDA GPU; choose --device cpu, or check "
                "`nvidia-smi` and that torch is a CUDA build"
            )
        name = torch.cuda.get_device_name()
        return Backend(torch.device("cuda"), f"cuda: {name}", precision)
    label = f"cpu: {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return Backend(torch.device("cpu"), label, precision)


def _xla(chips: int, num_cores: int, precision: str, compile_cache: str | None) -> XlaBackend:
    on_cpu = runtime.requested_platform() == "CPU"
    runtime.require_matching_versions()
    if not chips and not on_cpu:
        raise RequestError(
            "--use-tpu: this machine has no TPU. In Colab: Runtime > Change runtime type > "
            "v5e-1 TPU; on Kaggle: Settings > Accelerator > TPU v5e-8. To run XLA on the CPU "
            "instead, set PJRT_DEVICE=CPU"
        )
    cores = 1 if on_cpu else chips
    if num_cores > cores:
        raise RequestError(
            f"--num-cores {num_cores}: this machine has {cores} ({WHERE_EIGHT}); "
            f"use --num-cores {cores}"
        )
    if num_cores > 1:
        raise RequestError(
            f"--num-cores {num_cores}: this version trains on one core; use --num-cores 1"
        )
    if compile_cache:
        require_writable("--compile-cache", Path(compile_cache))
    return XlaBackend("CPU" if on_cpu else "TPU", precision, compile_cache)
