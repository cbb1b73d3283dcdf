"""What differs between devices, and nothing else: one small object chosen at start-up."""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.compiled_step import CompiledStep
from tpuscope.engine.replicas import Replicas
from tpuscope.engine.spmd import DataMesh
from tpuscope.engine.torch_xla import Counters
from tpuscope.errors import RequestError
from tpuscope.files import require_writable

from .. import model_tpu
from ..data.loader import WHOLE_BATCH, DataShard
from .config import Config
from .malloc import keep_freed_memory

Step = Callable[..., tuple[Tensor, ...]]

# What tunes the TPU's compiler for MSHNet's step, by the variables that it reads.
TPU_FLAGS = {
    # The pass cuts the maps of fewer than 8 images into strips, as more images, and copies them to
    # and fro: by the compiler's account, half of all bytes of such a step.
    "XLA_FLAGS": "--xla_disable_hlo_passes=space-to-batch-converter",
    # With tiles of its own for 8-bit numbers, for v6e, libtpu 0.0.21.1 aborts on our float32 step.
    "LIBTPU_INIT_ARGS": "--xla_tpu_enable_large_2nd_minor_layout_for_x8=false",
}

WHERE_EIGHT = (
    "Colab's TPUs have 1 core; Kaggle's TPU v5e-8 has 8, and so has a Cloud TPU v5litepod-8"
)


class Backend:
    """Eager PyTorch on one device; the base of the others.

    Attributes:
        device: where the model and the batches live.
        label: for people, such as ``"cuda: NVIDIA L4"``.
        cores: that share a global batch, on all hosts.
        input_shard: what this process input_shard of every global batch.
        output_shard: what it gets back of every global batch.
        is_main_process: whether this process writes the run's files; one of all does.
        agreement_interval: steps between two calls of :meth:`max_over_processes` in a training.
    """

    cores = 1
    input_shard: DataShard = WHOLE_BATCH
    output_shard: DataShard = WHOLE_BATCH
    is_main_process = True
    agreement_interval = 1
    # Of kernels, and so of all maps: convolutions of CPUs and GPUs want the channels innermost.
    memory_format = torch.channels_last

    def __init__(self, device: torch.device, label: str, precision: str = "fp32"):
        self.device = device
        self.label = label
        self.precision = precision

    def default_fold(self, config: Config) -> int:
        """How the network is to compute here, for ``MSHNet.fold``."""
        return config.space_to_depth or 0

    def move(self, module: nn.Module) -> None:
        """Move a module to the device, in place.

        Batch norm's counts of batches stay: nothing computes with them, and as 0-dimensional zeros
        they would be constants of the first XLA step and data of the second, one more compilation.
        """
        counted = [
            m for m in module.modules() if getattr(m, "num_batches_tracked", None) is not None
        ]
        counts = [m.num_batches_tracked for m in counted]
        module.to(self.device, memory_format=self.memory_format)
        for m, count in zip(counted, counts, strict=True):
            m.num_batches_tracked = count

    def prepare(
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
        self.move(model)
        optimizer = make_optimizer(model)
        optimizer.load_state_dict(state)
        return optimizer

    def device_batches(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        """The loader's batches, on the device."""
        for batch in loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def to_device(self, tensor: Tensor) -> Tensor:
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

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Update the weights, with the gradients of the whole global batch."""
        optimizer.step()

    def sync(self) -> None:
        """Where a step ends."""

    def compile_step(self, step: Step, state: Iterable[Tensor]) -> Step:
        """A step that will run many times, and ends itself.

        Args:
            step: from tensors on the device to a tuple of such, without :meth:`sync`. What
                differs from one run to the next has to be an argument.
            state: what else it reads and changes: parameters, buffers, the optimizer's sums, and
                the counts that it raises on the host.
        """

        def run(*batch: Tensor) -> tuple[Tensor, ...]:
            results = step(*batch)
            self.sync()
            return results

        return run

    def replicate_output(self, tensor: Tensor) -> Tensor:
        """A result that this process will read, made so that it can."""
        return tensor

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """Host vectors (N,) of all processes that hold different parts, added up."""
        return values

    def max_over_processes(self, value: int) -> int:
        """The largest value of all processes; they have to ask at the same steps."""
        return value

    def replica_state(self, model: nn.Module) -> Tensor | None:
        """What differs between replicas within an epoch, float32 (replicas, N), on the host.

        That is batch norm's statistics; None where there is one model only.
        """
        return None

    def set_replica_state(self, model: nn.Module, state: Tensor | None) -> None:
        """Give every replica its own again, or the mean where their number is another."""

    def mean_statistics(self, model: nn.Module, state: Tensor | None) -> dict[str, Tensor]:
        """The mean of :meth:`replica_state` by the names of a state_dict: one model for all."""
        return {}

    def end_epoch(self, model: nn.Module) -> None:
        """Make all replicas the same model again."""

    def check_same(self, digest: bytes) -> None:
        """Prove that all replicas hold the same weights.

        Args:
            digest: a hash of this one's.

        Raises:
            RuntimeError: they differ.
        """

    def counters(self) -> Counters:
        """Compilations, fallbacks and host reads so far; zeros where nothing is compiled."""
        return Counters()

    def rng_state(self) -> Any:
        """State of the device's random numbers, of types that a checkpoint may hold."""
        return torch.cuda.get_rng_state() if self.device.type == "cuda" else None

    def set_rng_state(self, state: Any) -> None:
        """Continue from a state of the same kind of device; another kind's is left alone."""
        if self.device.type == "cuda" and isinstance(state, Tensor):
            torch.cuda.set_rng_state(state)


class CpuBackend(Backend):
    """Eager PyTorch on the CPU."""

    def __init__(self, precision: str = "fp32"):
        keep_freed_memory()
        threads = torch.get_num_threads()
        label = f"cpu: {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
        super().__init__(torch.device("cpu"), label, precision)


class XlaBackend(Backend):
    """One XLA core: a TPU's, or the CPU under the same compiler front."""

    memory_format = torch.preserve_format  # XLA chooses layouts itself

    def __init__(self, precision: str = "fp32", compile_cache: str | None = None):
        if compile_cache:
            runtime.enable_compile_cache(compile_cache)
        super().__init__(runtime.device(), runtime.describe(), precision)

    def default_fold(self, config: Config) -> int:
        if config.space_to_depth is None and runtime.requested_platform() == "TPU":
            return model_tpu.default_fold(config.batch_size // self.cores)
        return super().default_fold(config)

    def device_batches(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        return runtime.DeviceLoader(loader, self.device)

    def sync(self) -> None:
        runtime.sync()

    def compile_step(self, step: Step, state: Iterable[Tensor]) -> Step:
        state = list(state)
        on_device = [tensor for tensor in state if tensor.device.type == "xla"]
        return CompiledStep(step, on_device, [t for t in state if t.device.type != "xla"])

    def counters(self) -> Counters:
        return runtime.counters()

    def rng_state(self) -> Any:
        return runtime.rng_state()

    def set_rng_state(self, state: Any) -> None:
        if isinstance(state, int):
            runtime.set_rng_state(state)


class SpmdBackend(XlaBackend):
    """All cores of all hosts as one device: the batch is split, everything else replicated."""

    def __init__(self, precision: str = "fp32", compile_cache: str | None = None):
        self.mesh = DataMesh()
        super().__init__(precision, compile_cache)
        self.cores = self.mesh.cores
        self.input_shard = DataShard(self.mesh.host, self.mesh.hosts)
        self.is_main_process = self.mesh.host == 0
        self.agreement_interval = 1 if self.mesh.hosts == 1 else 10

    def move(self, module: nn.Module) -> None:
        super().move(module)
        state = [*module.parameters(), *module.buffers()]
        self.mesh.replicate(tensor for tensor in state if tensor.device.type == "xla")

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], state: dict | None
    ) -> Optimizer:
        optimizer = super().prepare(model, make_optimizer, state)
        values = [v for slots in optimizer.state.values() for v in slots.values()]
        self.mesh.replicate(v for v in values if v.device.type == "xla")
        return optimizer

    def device_batches(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        return runtime.DeviceLoader(loader, self.device, self.mesh.split(4))

    def to_device(self, tensor: Tensor) -> Tensor:
        placed = super().to_device(tensor)
        self.mesh.replicate([placed])
        return placed

    def compile_step(self, step: Step, state: Iterable[Tensor]) -> Step:
        # Under SPMD torch_xla gives what a program has read another number, so that a program's
        # arguments cannot be found again (tpuscope/engine/compiled_step.py).
        return Backend.compile_step(self, step, state)

    def replicate_output(self, tensor: Tensor) -> Tensor:
        # A host can read only what one of its cores holds, so every core gets the whole tensor.
        # A result of its own, because an input's sharding is fixed.
        whole = tensor * 1
        self.mesh.replicate([whole])
        return whole

    def max_over_processes(self, value: int) -> int:
        return self.mesh.largest(value)


class ReplicaBackend(XlaBackend):
    """One of several replicas of the model, each on a core of its own with a part of the batch.

    Gradients are averaged in every step. Batch norm sees its replica's part only; its running
    statistics are averaged after every epoch, so that evaluation and weights know one model.
    """

    def __init__(
        self, replicas: Replicas, precision: str = "fp32", compile_cache: str | None = None
    ):
        super().__init__(precision, compile_cache)
        self.replicas = replicas
        self.cores = replicas.count
        self.label = f"{self.label.split(',')[0]}, {replicas.count} replicas"
        self.input_shard = self.output_shard = DataShard(replicas.ordinal, replicas.count)
        self.is_main_process = replicas.ordinal == 0
        self.agreement_interval = 10

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], state: dict | None
    ) -> Optimizer:
        optimizer = super().prepare(model, make_optimizer, state)
        values = [*model.parameters(), *model.buffers()]
        values += [v for slots in optimizer.state.values() for v in slots.values()]
        self.replicas.broadcast(v for v in values if v.device.type == "xla")
        return optimizer

    def optimizer_step(self, optimizer: Optimizer) -> None:
        self.replicas.optimizer_step(optimizer)

    def compile_step(self, step: Step, state: Iterable[Tensor]) -> Step:
        # Virtual replicas reduce on the host, in the middle of a step.
        return Backend.compile_step(self, step, state)

    def sum_over_processes(self, values: Tensor) -> Tensor:
        return self.replicas.gather(values).sum(0)

    def max_over_processes(self, value: int) -> int:
        return int(self.replicas.gather(torch.tensor([value])).max())

    def replica_state(self, model: nn.Module) -> Tensor:
        own = torch.cat([buffer.detach().cpu().flatten() for buffer in _statistics(model)])
        return self.replicas.gather(own)

    @torch.no_grad()
    def set_replica_state(self, model: nn.Module, state: Tensor | None) -> None:
        if state is None:
            return
        same = len(state) == self.replicas.count
        own = state[self.replicas.ordinal] if same else state.mean(0)
        buffers = _statistics(model)
        pieces = own.split([buffer.numel() for buffer in buffers])
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer.copy_(piece.view(buffer.shape))

    def mean_statistics(self, model: nn.Module, state: Tensor | None) -> dict[str, Tensor]:
        named = [(name, b) for name, b in model.named_buffers() if b.device.type == "xla"]
        pieces = state.mean(0).split([buffer.numel() for _, buffer in named])
        return {n: p.view(b.shape) for (n, b), p in zip(named, pieces, strict=True)}

    def end_epoch(self, model: nn.Module) -> None:
        self.set_replica_state(model, self.replica_state(model).mean(0, keepdim=True))

    def check_same(self, digest: bytes) -> None:
        hashes = self.replicas.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        if (hashes != hashes[0]).any():
            raise RuntimeError(
                "the replicas' weights differ: "
                + ", ".join(f"{i}: {h.numpy().tobytes().hex()[:16]}" for i, h in enumerate(hashes))
            )


def _statistics(model: nn.Module) -> list[Tensor]:
    """Batch norm's running means and variances."""
    return [buffer for buffer in model.buffers() if buffer.device.type == "xla"]


def resolve_device(device: str = "auto", num_cores: int = 1, strategy: str = "spmd") -> str:
    """Where a request will run; nothing is opened.

    Args:
        device: ``"auto"`` (TPU, then CUDA, then CPU), ``"tpu"``, ``"cuda"`` or ``"cpu"``. With
            ``PJRT_DEVICE=CPU`` set, ``"tpu"`` means XLA on the CPU.
        num_cores: cores of this machine to train on.
        strategy: ``"spmd"`` or ``"launch"``.

    Returns:
        ``"xla:TPU"``, ``"xla:CPU"``, ``"cuda"`` or ``"cpu"``.

    Raises:
        RequestError: the device is not there, or has fewer cores.
    """
    try:
        # Not asked for --device cpu or cuda: they are the way out where torch_xla is broken.
        chips = runtime.tpu_chips() if device in ("auto", "tpu") else 0
        if device == "auto":
            device = "tpu" if chips else "cuda" if torch.cuda.is_available() else "cpu"
        if device == "tpu":
            platform = _platform(chips, num_cores)
            if platform == "TPU":
                _require_whole_slice(num_cores, strategy)
            return f"xla:{platform}"
    except runtime.XlaUnavailable as error:
        raise RequestError(str(error)) from error
    if num_cores > 1:
        raise RequestError(
            f"--num-cores {num_cores}: --device {device} trains on 1; several cores are a TPU's "
            f"({WHERE_EIGHT})"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            "--device cuda: PyTorch finds no CUDA GPU; choose --device cpu, or check "
            "`nvidia-smi` and that torch is a CUDA build"
        )
    return device


def _platform(chips: int, num_cores: int) -> str:
    runtime.require_matching_versions()
    on_cpu = runtime.requested_platform() == "CPU"
    if not chips and not on_cpu:
        raise RequestError(
            "--use-tpu: this machine has no TPU. In Colab: Runtime > Change runtime type > "
            "v5e-1 TPU; on Kaggle: Settings > Accelerator > TPU v5e-8. To run XLA on the CPU "
            "instead, set PJRT_DEVICE=CPU"
        )
    platform = "CPU" if on_cpu else "TPU"
    possible = runtime.possible_cores(platform)
    if num_cores > max(possible):
        there = (
            "XLA on the CPU has 8 virtual ones" if on_cpu else f"this machine has {possible[-1]}"
        )
        raise RequestError(
            f"--num-cores {num_cores}: {there} ({WHERE_EIGHT}; more than 8 are a pod slice's, "
            f"GUIDE.md); use --num-cores {max(possible)}"
        )
    if num_cores not in possible:
        raise RequestError(
            f"--num-cores {num_cores}: cores are taken by rectangles of the board; use "
            + " or ".join(map(str, possible))
        )
    if num_cores > 1 and runtime.is_open():
        raise RequestError(
            f"--num-cores {num_cores}: this process has opened its device already, and its cores "
            "are settled; train in a process of its own: `!mshnet train …` in a notebook"
        )
    return platform


def _require_whole_slice(num_cores: int, strategy: str) -> None:
    """On a slice of several machines, all cores of each take part, as one program.

    Raises:
        RequestError: a part of them would train alone, each machine for itself.
    """
    everything = runtime.possible_cores("TPU")[-1]
    if num_cores == everything and strategy == "spmd":
        return  # right for one machine and for many
    hosts = runtime.tpu_hosts()
    if hosts > 1 and strategy == "launch":
        raise RequestError(
            f"--strategy launch: it is for one machine, and this is one of {hosts} of a slice; "
            "use --strategy spmd"
        )
    if hosts > 1:
        raise RequestError(
            f"--num-cores {num_cores}: this machine is one of {hosts} of a slice, and all of its "
            f"cores take part; use --num-cores {everything}"
        )


def make_backend(
    device: str = "auto",
    num_cores: int = 1,
    precision: str = "fp32",
    compile_cache: str | None = None,
    replicas: Replicas | None = None,
) -> Backend:
    """Open the backend for a request.

    Args:
        device: see :func:`resolve_device`.
        num_cores: cores of this machine to train on.
        precision: ``"fp32"`` or ``"bf16"`` (autocast).
        compile_cache: folder for compiled programs; XLA only.
        replicas: in a process that :func:`tpuscope.engine.replicas.launch` started, what it was
        given.

    Raises:
        RequestError: the device is not there, or has fewer cores.
    """
    if replicas:
        if compile_cache:  # torch_xla writes a program's file in place: each replica has its own
            compile_cache = str(Path(compile_cache) / f"replica-{replicas.ordinal}")
        return ReplicaBackend(replicas, precision, compile_cache)
    place = resolve_device(device, num_cores)
    if place.startswith("xla:"):
        if compile_cache:
            require_writable("--compile-cache", Path(compile_cache))
        if not runtime.is_open():
            platform = place.removeprefix("xla:")
            runtime.select_platform(platform, num_cores, tpu_flags=TPU_FLAGS)
        return (SpmdBackend if num_cores > 1 else XlaBackend)(precision, compile_cache)
    if place == "cuda":
        name = torch.cuda.get_device_name()
        return Backend(torch.device("cuda"), f"cuda: {name}", precision)
    return CpuBackend(precision)
