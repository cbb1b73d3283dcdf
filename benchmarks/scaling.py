"""Estimate MSHNet's training step on TPU v5e for 1 to 256 cores, from what the TPU's compiler says.

libtpu holds the whole TPU compiler and needs no TPU for compiling. So the step is traced on virtual
cores, compiled for v5e, and the compiled program says what a core computes, moves and stores, and
what the cores reduce together. The rest is arithmetic: a bound, not a measurement. A step takes at
least the longer of

* floating-point operations / peak
* bytes accessed / HBM bandwidth

and then its all-reduces, as if nothing of them were hidden behind computation:

* bytes, as in a ring: 2 (n - 1) / n x bytes / bandwidth of one link in one direction
* latency: as many hops as it takes along both axes of the slice and back, each all-reduce anew

Left out: the host that loads and uploads batches, evaluation, and what the compiler would do with
more effort. A program takes one to three minutes and up to 15 GB of the host's memory.
"""

import argparse
import importlib.util
import math
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

# https://docs.cloud.google.com/tpu/docs/v5e
PEAK = 197e12  # bf16 operations a second and chip, of one core each
HBM_BANDWIDTH = 819e9  # bytes a second
LINK = 400e9 / 4 / 2  # bytes a second: 400 GB/s a chip for both directions of its four links

# A hop of 1 us is the theory of https://jax-ml.github.io/scaling-book/sharding/; the profile that
# it shows has 3 hops in 8 us.
HOP = 8e-6 / 3

SLICES = {1: (1, 1), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one step on one core.

    Attributes:
        flops: floating-point operations.
        accessed: bytes read and written in HBM.
        stored: bytes held in HBM: arguments, results, temporaries.
        all_reduces: how many.
        reduced: bytes that they reduce, all together.
    """

    flops: float
    accessed: float
    stored: float
    all_reduces: int = 0
    reduced: float = 0.0


def reduce_seconds(cores: int, compiled: Compiled) -> float:
    """Time of all all-reduces of a step, one after the other."""
    rows, columns = SLICES[cores]
    ring = 2 * (cores - 1) / cores * compiled.reduced / LINK
    hops = 2 * (rows - 1 + columns - 1)
    return ring + compiled.all_reduces * hops * HOP


def step_seconds(cores: int, compiled: Compiled) -> float:
    """Time of a step, at least."""
    alone = max(compiled.flops / PEAK, compiled.accessed / HBM_BANDWIDTH)
    return alone + reduce_seconds(cores, compiled)


HEAD = (
    "cores", "batch a core", "global batch", "HBM, GB", "flops / peak, ms", "bytes / bandwidth, ms",
    "all-reduces, ms", "step at least, ms", "images/s at most", "of it a core",
)  # fmt: skip


def table(rows: list[tuple[int, int, Compiled | None]]) -> str:
    """Markdown; a row is cores, batch of a core, and the program (None: it does not fit)."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for cores, batch, compiled in rows:
        line = [cores, batch, cores * batch]
        if compiled is None:
            line += ["does not fit", *"–" * 6]
        else:
            seconds = step_seconds(cores, compiled)
            times = (
                compiled.flops / PEAK,
                compiled.accessed / HBM_BANDWIDTH,
                reduce_seconds(cores, compiled),
                seconds,
            )
            line += [f"{compiled.stored / 1e9:.1f}", *(f"{1000 * t:.1f}" for t in times)]
            line += [f"{cores * batch / seconds:,.0f}", f"{batch / seconds:,.0f}"]
        lines.append(line)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def trace(cores: int, batch: int, size: int, precision: str) -> bytes:
    """StableHLO of a training step on virtual cores; only in a process that has opened no device.

    Args:
        batch: of a core.
        size: side of the images, pixels.
        precision: ``"fp32"`` or ``"bf16"``.
    """
    import torch
    from torch.optim import Adagrad

    from mshnet import MSHNet, SLSIoULoss
    from mshnet.training.backend import SpmdBackend, XlaBackend
    from mshnet.training.step import Normalize, train_step
    from mshnet.xla import runtime

    runtime.select_platform("CPU", cores)
    backend = (SpmdBackend if cores > 1 else XlaBackend)(precision)
    import torch_xla.core.xla_model as xm

    model = MSHNet()
    optimizer = backend.place(model, lambda m: Adagrad(m.parameters(), lr=0.05), None)
    normalize = Normalize()
    backend.move(normalize)
    images = torch.zeros(cores * batch, 1, size, size, dtype=torch.uint8)
    [[images, masks]] = backend.feed([[images, images.clone()]])
    criterion, warm_epoch = SLSIoULoss(), 0
    loss = train_step(
        model, normalize, criterion, optimizer, backend, images, masks, warm_epoch, warm_epoch + 1
    )
    state = [*model.parameters(), *model.buffers()]
    state += [value for slots in optimizer.state.values() for value in slots.values()]
    return xm.get_stablehlo_bytecode([loss, *(t for t in state if t.device.type == "xla")])


def compile_for_tpu(program: bytes, cores: int) -> Compiled:
    """Compile a StableHLO program for a slice of TPU v5e, without a TPU.

    With the compiler's lowest effort, which takes a fraction of the time and, without transfers
    into on-chip memory ahead of time, leaves the bytes that HBM has to move.

    Raises:
        jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED where the program does not fit into HBM.
    """
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # do not look for a TPU VM's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nobody's TPU is taken by compiling
    }
    import numpy as np
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    rows, columns = SLICES[cores]
    chips = {"chips_per_host_bounds": [1, 1, 1]} if cores == 1 else {}
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=f"v5e:{rows}x{columns}", **chips
    ).devices
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, cores
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, cores
    build.device_assignment = options.device_assignment
    build.use_spmd_partitioning = cores > 1
    build.exec_time_optimization_effort = build.memory_fitting_effort = -1.0
    executable = devices[0].client.compile(program, xla_client.DeviceList(tuple(devices)), options)
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    count, size = all_reduces(executable.hlo_modules()[0].to_string())
    return Compiled(
        flops=cost["flops"],
        accessed=cost["bytes accessed"],
        stored=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes,
        all_reduces=count,
        reduced=size,
    )


def all_reduces(hlo: str) -> tuple[int, int]:
    """How many all-reduces the text of a compiled program has, and the bytes of their results."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", hlo)
    arrays = re.findall(r"\b(\w+)\[([\d,]*)\]", " ".join(results))
    sizes = (
        BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in arrays
    )
    return len(results), sum(sizes)


def _answer(cores: int, batch: int, size: int, precision: str) -> Compiled | None:
    program = trace(cores, batch, size, precision)
    try:
        return compile_for_tpu(program, cores)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"{batch} images on a core: {str(error)[:200]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 8, 32, 256], choices=SLICES)
    parser.add_argument(
        "--core-batch",
        type=int,
        nargs="*",
        default=[128, 32],
        help="weak scaling: images a core, default: 128 32",
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        nargs="*",
        default=[256],
        help="strong scaling: images a step, default: 256",
    )
    parser.add_argument(
        "--size", type=int, default=256, help="side of the images, pixels, default: %(default)s"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument(
        "--compile-up-to",
        type=int,
        default=8,
        choices=SLICES,
        help="most cores to compile for; larger slices are computed from that program, whose cores "
        "do the same (default: %(default)s)",
    )
    options = parser.parse_args()
    if not all(map(importlib.util.find_spec, ("torch_xla", "jax", "libtpu"))):
        parser.exit(2, "torch_xla, jax or libtpu is missing; pip install '.[aot]'\n")
    rows = [(cores, batch) for batch in options.core_batch for cores in options.cores]
    rows += [
        (cores, size // cores)
        for size in options.global_batch
        for cores in options.cores
        if size % cores == 0
    ]
    answers: dict[tuple[int, int], Compiled | None] = {}
    context = multiprocessing.get_context("spawn")
    # How many virtual cores a process has is settled once: a process for each program.
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        for cores, batch in rows:
            key = min(cores, options.compile_up_to), batch
            if key not in answers:
                answers[key] = processes.submit(
                    _answer, *key, options.size, options.precision
                ).result()
                print(f"{key[0]} cores, {batch} images each: {answers[key]}", flush=True)
    print(table([(c, b, answers[min(c, options.compile_up_to), b]) for c, b in rows]))


if __name__ == "__main__":
    main()
