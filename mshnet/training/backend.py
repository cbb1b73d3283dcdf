"""What differs between devices: one object that is chosen at start-up."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tpuscope.engine import torch_tpu
from tpuscope.engine import torch_xla as runtime
from tpuscope.engine.compiled_step import CompiledStep
from tpuscope.engine.fx_step import FxStep
from tpuscope.engine.processes import TorchProcesses, join
from tpuscope.engine.replicas import Replicas
from tpuscope.engine.spmd import DataMesh
from tpuscope.engine.torch_xla import Counters
from tpuscope.files import require_writable

from .. import model_tpu
from ..batch_norm import BatchNorm2d
from ..data.loader import WHOLE_BATCH, DataShard
from .config import Config
from .devices import resolve_device

Step = Callable[..., tuple[Tensor, ...]]
Result = TypeVar("Result")

# Flags that tune the TPU's compiler for MSHNet's step, by the variable that holds them.
TPU_FLAGS = {
    # The pass cuts the maps of fewer than 8 images into strips, as more images, and copies them
    # back and forth: by the compiler's estimate, half of all bytes of such a step.
    "XLA_FLAGS": "--xla_disable_hlo_passes=space-to-batch-converter",
    # With separate tiles for 8-bit numbers, libtpu 0.0.21.1 aborts on our float32 step on v6e.
    "LIBTPU_INIT_ARGS": "--xla_tpu_enable_large_2nd_minor_layout_for_x8=false",
}


class Backend:
    """Eager PyTorch on one device; the base of the others.

    Attributes:
        device: of the model and the batches.
        label: for people, such as ``"cuda: NVIDIA L4"``.
        precision: ``"fp32"`` or ``"bf16"`` (autocast).
        cores: number of cores or processes, on all hosts, that share a global batch.
        input_shard: slice of the global batch that this process loads.
        output_shard: slice of the global batch whose outputs this process reads.
        is_main_process: whether this process writes the run's files; exactly one does.
        agreement_interval: steps between two calls of :meth:`max_over_processes` in training.
    """

    cores = 1
    input_shard: DataShard = WHOLE_BATCH
    output_shard: DataShard = WHOLE_BATCH
    is_main_process = True
    agreement_interval = 1
    # Convolutions on CPUs and GPUs are fastest with the channels innermost.
    memory_format = torch.channels_last

    def __init__(self, device: torch.device, label: str, precision: str = "fp32"):
        self.device = device
        self.label = label
        self.precision = precision

    def default_fold(self, config: Config) -> int:
        """Return the space-to-depth factor for ``MSHNet.fold``: the requested or the device's."""
        return config.space_to_depth or 0

    def move(self, module: nn.Module) -> None:
        """Move a module to the device, in place.

        Batch norm's counts of batches stay on the host: nothing computes with them, and as
        0-dimensional zeros they would be constants of the first XLA step and data of the second,
        which costs one more compilation.
        """
        counted = [
            m for m in module.modules() if getattr(m, "num_batches_tracked", None) is not None
        ]
        counts = [m.num_batches_tracked for m in counted]
        module.to(self.device, memory_format=self.memory_format)  # pyright: ignore[reportCallIssue]
        for m, count in zip(counted, counts, strict=True):
            m.num_batches_tracked = count

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], state: dict | None
    ) -> Optimizer:
        """Move the model to the device and return its optimizer.

        Args:
            model: on the host; moved in place.
            make_optimizer: from a model to its optimizer.
            state: the optimizer's state to continue from, or None for a fresh one.
        """
        # The state always comes from the host: made on an XLA device, its zeros would be part of
        # the first step's graph, and the second step would be another graph.
        state = state or make_optimizer(model).state_dict()
        self.move(model)
        optimizer = make_optimizer(model)
        optimizer.load_state_dict(state)
        return optimizer

    def device_batches(self, loader: DataLoader) -> Iterable[list[Tensor]]:
        """Yield the loader's batches, on the device."""
        for batch in loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a copy of a host tensor on the device, as data of the graph.

        At least one dimension: torch_xla makes a 0-dimensional 0 or 1 a constant of the graph,
        and its other values then need another graph.
        """
        assert tensor.dim() > 0, "a 0-dimensional tensor may become a constant of the graph"
        return tensor.to(self.device)

    def autocast(self) -> AbstractContextManager:
        """Return the context of the forward pass: bfloat16 autocast if the precision is bf16."""
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Update the weights with the gradients of the whole global batch."""
        optimizer.step()

    def sync(self) -> None:
        """End a step: dispatch what has been traced (XLA)."""

    def compile_step(
        self, step: Step, state: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()
    ) -> Step:
        """Return a step that runs many times and calls :meth:`sync` itself.

        Args:
            step: from tensors on the device to a tuple of such, without :meth:`sync`. What
                differs from one call to the next has to be an argument.
            state: tensors that it also reads and changes: parameters, buffers, the optimizer's
                sums, and the counts that it raises on the host.
            optimizers: whose settings (learning rate, betas) it uses.
        """

        def run(*batch: Tensor) -> tuple[Tensor, ...]:
            results = step(*batch)
            self.sync()
            return results

        return run

    def replicate_output(self, tensor: Tensor) -> Tensor:
        """Return a result in a form that this process can read."""
        return tensor

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the global batch from that of this process's shard, a scalar.

        Where it is this shard's, the trainer takes the mean at the end of an epoch.
        """
        return loss

    def from_main_process(self, make: Callable[[], Result]) -> Result:
        """Return what a function returns in the process that has the run's folder."""
        return make()

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """Return the sum of the host vectors (N,) of all processes with a shard of their own."""
        return values

    def max_over_processes(self, value: int) -> int:
        """Return the largest value of all processes; all have to call it at the same step."""
        return value

    def replica_state(self, model: nn.Module) -> Tensor | None:
        """Return batch norm's statistics of every replica, float32 (replicas, N), on the host.

        They differ between replicas within an epoch. None where there is one model only.
        """
        return None

    def set_replica_state(self, model: nn.Module, state: Tensor | None) -> None:
        """Restore every replica's statistics; their mean if the number of replicas differs."""

    def mean_statistics(self, model: nn.Module, state: Tensor | None) -> dict[str, Tensor]:
        """Return the mean of :meth:`replica_state` by the names of a state_dict."""
        return {}

    def end_epoch(self, model: nn.Module) -> None:
        """Average what differs between the replicas, so that all are one model."""

    def check_same(self, digest: bytes) -> None:
        """Check that all replicas hold the same weights.

        Args:
            digest: a hash of this replica's.

        Raises:
            RuntimeError: they differ.
        """

    def counters(self) -> Counters:
        """Return compilations, fallbacks and host reads so far; zeros without XLA."""
        return Counters()

    def seed(self, value: int) -> None:
        """Seed the random numbers of the next step, on the host and on the device.

        Args:
            value: 2 or more: as a 0 or 1, XLA's seed would be a constant of the graph.
        """
        # Not torch.manual_seed, which also collects a stack for devices that are not there.
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)


class CpuBackend(Backend):
    """Eager PyTorch on the CPU."""

    def __init__(self, precision: str = "fp32"):
        threads = torch.get_num_threads()
        label = f"cpu: {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}"
        super().__init__(torch.device("cpu"), label, precision)


class XlaBackend(Backend):
    """One XLA device: a TPU core, or the CPU through XLA."""

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

    def compile_step(
        self, step: Step, state: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()
    ) -> Step:
        state = list(state)
        on_device = [tensor for tensor in state if tensor.device.type == "xla"]
        on_host = [tensor for tensor in state if tensor.device.type != "xla"]
        return CompiledStep(step, on_device, on_host, optimizers=optimizers)

    def counters(self) -> Counters:
        return runtime.counters()

    def seed(self, value: int) -> None:
        super().seed(value)
        runtime.set_rng_state(value)


class TorchTpuBackend(Backend):
    """One device of TorchTPU; each step is one program."""

    memory_format = torch.preserve_format  # XLA chooses layouts itself

    def __init__(self, precision: str = "fp32"):
        super().__init__(torch_tpu.device(), torch_tpu.describe(), precision)

    def default_fold(self, config: Config) -> int:
        if config.space_to_depth is not None:
            return config.space_to_depth
        # 1 at least: torch_tpu loses the statistics of PyTorch's batch norm.
        return 1 if torch_tpu.on_cpu() else model_tpu.default_fold(config.batch_size)

    def compile_step(
        self, step: Step, state: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()
    ) -> Step:
        state = list(state)
        on_device = [tensor for tensor in state if tensor.device.type == "tpu"]
        on_host = [tensor for tensor in state if tensor.device.type == "cpu"]
        return FxStep(step, on_device, on_host, optimizers)

    def counters(self) -> Counters:
        return torch_tpu.counters()

    def seed(self, value: int) -> None:
        super().seed(value)
        torch_tpu.seed(value)


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

    def compile_step(
        self, step: Step, state: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()
    ) -> Step:
        # Under SPMD torch_xla renumbers the tensors that a program has read, so that a program's
        # arguments cannot be identified (tpuscope/engine/compiled_step.py).
        return Backend.compile_step(self, step, state)

    def replicate_output(self, tensor: Tensor) -> Tensor:
        # A host can read only what one of its cores holds, so every core gets the whole tensor;
        # as a separate result, because an input's sharding is fixed.
        whole = tensor * 1
        self.mesh.replicate([whole])
        return whole

    def max_over_processes(self, value: int) -> int:
        return self.mesh.largest(value)


class ReplicaBackend(XlaBackend):
    """One of several replicas of the model, each with its own core and shard of the batch.

    Gradients are averaged in every step. Batch norm sees its replica's shard only; its running
    statistics are averaged after every epoch, so that there is one model to evaluate and save.
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
        self.replicas.broadcast(v for v in _state(model, optimizer) if v.device.type == "xla")
        return optimizer

    def optimizer_step(self, optimizer: Optimizer) -> None:
        self.replicas.optimizer_step(optimizer)

    def compile_step(
        self, step: Step, state: Iterable[Tensor], optimizers: Sequence[Optimizer] = ()
    ) -> Step:
        # Virtual replicas reduce on the host, in the middle of a step, so it cannot be compiled.
        return Backend.compile_step(self, step, state)

    def seed(self, value: int) -> None:
        super().seed(value + self.replicas.ordinal)  # different images, different dropout masks

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
        assert state is not None, "replicas have a state of their own"
        named = [(name, b) for name, b in model.named_buffers() if b.device.type == "xla"]
        pieces = state.mean(0).split([buffer.numel() for _, buffer in named])
        return {n: p.view(b.shape) for (n, b), p in zip(named, pieces, strict=True)}

    def end_epoch(self, model: nn.Module) -> None:
        self.set_replica_state(model, self.replica_state(model).mean(0, keepdim=True))

    def check_same(self, digest: bytes) -> None:
        _require_equal(self.replicas.gather(_as_vector(digest)))


class DistributedBackend(Backend):
    """One process of a torchrun job, on a CPU or a device of its own, with a shard of the batch.

    The numbers are those of one process with the global batch, up to rounding: batch norm's means
    are taken over the processes, and gradients and losses are averaged in every step.
    """

    def __init__(
        self, processes: TorchProcesses, device: torch.device, name: str, precision: str = "fp32"
    ):
        super().__init__(device, _processes_label(device, processes) + name, precision)
        processes.open(device)
        self.processes = processes
        self.cores = processes.count
        self.input_shard = self.output_shard = DataShard(processes.rank, processes.count)
        self.is_main_process = processes.is_main

    def move(self, module: nn.Module) -> None:
        super().move(module)
        for layer in module.modules():
            if isinstance(layer, BatchNorm2d):
                layer.processes = self.processes

    def prepare(
        self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], state: dict | None
    ) -> Optimizer:
        optimizer = super().prepare(model, make_optimizer, state)
        self.processes.broadcast(_state(model, optimizer))
        return optimizer

    def optimizer_step(self, optimizer: Optimizer) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.processes.average(p.grad for p in parameters if p.grad is not None)
        optimizer.step()

    def seed(self, value: int) -> None:
        super().seed(value + self.processes.rank)  # different images, different dropout masks

    def mean_loss(self, loss: Tensor) -> Tensor:
        # The sum of an epoch's losses is then the same in every process, to the bit, and a resumed
        # run continues it exactly.
        [mean] = self.processes.mean(loss)
        return mean

    def from_main_process(self, make: Callable[[], Result]) -> Result:
        return self.processes.from_main(make)

    def sum_over_processes(self, values: Tensor) -> Tensor:
        return self.processes.gather(values).sum(0)

    def max_over_processes(self, value: int) -> int:
        return self.processes.largest(value)

    def check_same(self, digest: bytes) -> None:
        _require_equal(self.processes.gather(_as_vector(digest)))


def _state(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Return all tensors that training changes: parameters, buffers, the optimizer's sums."""
    slots = [value for values in optimizer.state.values() for value in values.values()]
    return [*model.parameters(), *model.buffers(), *slots]


def _processes_label(device: torch.device, processes: TorchProcesses) -> str:
    def some(count: int, one: str, more: str) -> str:
        return f"{count} {one if count == 1 else more}"

    count = some(processes.count, "process", "processes")
    return f"{device.type}: {count} on {some(processes.machines, 'machine', 'machines')}"


def _as_vector(digest: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digest), dtype=torch.int64)


def _require_equal(hashes: Tensor) -> None:
    """Check that all replicas have the same hash of their weights, int64 (replicas, 4).

    Raises:
        RuntimeError: shows them.
    """
    if (hashes != hashes[0]).any():
        raise RuntimeError(
            "the replicas' weights differ: "
            + ", ".join(f"{i}: {h.numpy().tobytes().hex()[:16]}" for i, h in enumerate(hashes))
        )


def _statistics(model: nn.Module) -> list[Tensor]:
    """Return batch norm's running means and variances."""
    return [buffer for buffer in model.buffers() if buffer.device.type == "xla"]


def make_backend(
    device: str = "auto",
    num_cores: int = 1,
    precision: str = "fp32",
    compile_cache: str | None = None,
    replicas: Replicas | None = None,
    engine: str = "auto",
) -> Backend:
    """Open the device of a request and return its backend.

    In a process that torchrun has started, the processes of its job share the work.

    Args:
        device: see :func:`.devices.resolve_device`.
        num_cores: cores of this machine to train on.
        precision: ``"fp32"`` or ``"bf16"`` (autocast).
        compile_cache: folder for compiled programs; XLA only.
        engine: of the device ``"tpu"``, see :func:`.devices.resolve_device`.
        replicas: this process's, if :func:`tpuscope.engine.replicas.launch` started it.

    Raises:
        RequestError: the device is not there, or has fewer cores.
    """
    if replicas:
        if compile_cache:  # torch_xla writes a program's file in place: each replica has its own
            compile_cache = str(Path(compile_cache) / f"replica-{replicas.ordinal}")
        return ReplicaBackend(replicas, precision, compile_cache)
    place = resolve_device(device, num_cores, engine=engine)
    if place.startswith("torch_tpu:"):
        return TorchTpuBackend(precision)
    if place.startswith("xla:"):
        if compile_cache:
            require_writable("--compile-cache", Path(compile_cache))
        if not runtime.is_open():
            platform = place.removeprefix("xla:")
            runtime.select_platform(platform, num_cores, tpu_flags=TPU_FLAGS)
        return (SpmdBackend if num_cores > 1 else XlaBackend)(precision, compile_cache)
    processes = join()
    if isinstance(processes, TorchProcesses):
        return _distributed(processes, place, precision)
    if place == "cuda":
        name = torch.cuda.get_device_name()
        return Backend(torch.device("cuda"), f"cuda: {name}", precision)
    return CpuBackend(precision)


def _distributed(processes: TorchProcesses, place: str, precision: str) -> DistributedBackend:
    """Open this process's device: the CPU, or the accelerator of its number on its machine."""
    if place == "cpu":
        return DistributedBackend(processes, torch.device("cpu"), "", precision)
    device = torch.device(place, processes.local_rank)
    torch.cuda.set_device(device)
    name = f", {torch.cuda.get_device_name(device)}"
    return DistributedBackend(processes, device, name, precision)
