"""The process that compiles for a TPU: ``python -P worker.py FOLDER``.

It reads ``program`` and ``request.json`` from the folder and leaves ``answer.json`` and, of a
program that fits, the compiled program in ``dump``: the compiler writes it while it works.
(Asking the executable for it takes minutes and up to 40 GB: it reads the machine code back.)
Without ``program`` it only asks whether the compiler knows the slice.

It is a process of its own so that libtpu, which takes gigabytes and aborts on some errors, is never
loaded where a model lives. It imports nothing of the package, so any Python that has jax and libtpu
can run it. Two forms of jax's interface are in use, that of 0.7 and that of 0.11 and later; what
the objects offer decides, not a version.
"""

# pyright: reportAttributeAccessIssue=false
# (jaxlib has no types for what its C++ modules add.)
import io
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.interpreters import mlir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

LEAST_EFFORT = -1.0  # of a scale from -1 to 1
LEAST_LEVEL = 9  # XLA's EFFORT_O0; 0 is its default, which is more
BYTECODE = b"ML\xefR"  # of plain MLIR and of StableHLO's portable artifacts


class WrongRequest(Exception):
    """The program cannot be read, or is for another number of cores."""


class SliceRefused(Exception):
    """The compiler does not know the slice."""


def devices_of(request: dict) -> list:
    """Return the devices of the slice that the request names.

    Raises:
        SliceRefused: with the compiler's words.
    """
    try:
        slice_ = topologies.get_topology_desc(
            platform="tpu", topology_name=request["topology"], **request["options"]
        )
    except RuntimeError as error:
        raise SliceRefused(str(error)) from error
    return slice_.devices


def parse(program: bytes) -> ir.Module:
    """Return the module of a program: a portable artifact, MLIR bytecode, or MLIR text.

    Raises:
        WrongRequest: it is none of them, or newer than this jaxlib.
    """
    context = mlir.make_ir_context()  # with the dialects that jax's programs use
    try:
        with context:
            if program.startswith(BYTECODE):
                module = stablehlo.deserialize_portable_artifact(context, program)
            else:
                module = ir.Module.parse(program.decode())
    except Exception as error:  # its type differs between versions
        first = next((line for line in str(error).splitlines() if "error:" in line), str(error))
        jaxlib = metadata.version("jaxlib")
        raise WrongRequest(
            f"not StableHLO that jaxlib {jaxlib} can read (it knows versions up to "
            f"{stablehlo.get_current_version()}): {first.strip()}"
        ) from error
    return module


def cores_of(module: ir.Module, requested: int | None) -> tuple[int, int]:
    """Return replicas and partitions.

    Args:
        requested: cores that work on one copy of the program; None for what the module says.
    """
    said = module.operation.attributes
    replicas, partitions = (
        ir.IntegerAttr(said[name]).value if name in said else 1
        for name in ("mhlo.num_replicas", "mhlo.num_partitions")
    )
    if requested is None:
        return replicas, partitions
    if replicas * partitions not in (1, requested):
        raise WrongRequest(f"the program is for {replicas * partitions} cores, not {requested}")
    return 1, requested


def options_of(devices: list, replicas: int, partitions: int, effort: str) -> Any:
    """Return the compiler's options."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    ids = np.array([device.id for device in devices]).reshape(replicas, partitions)
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    build.device_assignment = options.device_assignment
    for settings in (options, build):
        settings.num_replicas, settings.num_partitions = replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    if effort == "fast":
        # jax 0.7 and 0.10 have both pairs; only the older one has an effect in 0.7.
        if hasattr(build, "exec_time_optimization_effort"):
            build.exec_time_optimization_effort = build.memory_fitting_effort = LEAST_EFFORT
        else:
            build.optimization_level = build.memory_fitting_level = LEAST_LEVEL
    return options


def compile_program(program: bytes, request: dict) -> dict:
    """Compile StableHLO for the slice that the request names.

    Args:
        program: as in :func:`parse`.
        request: ``topology``, ``options`` (of its description), ``cores``, ``effort``, ``aliases``.

    Returns:
        Cores; sizes in bytes, costs, seconds; or ``error``, the compiler's words, which have
        RESOURCE_EXHAUSTED if the program does not fit.

    Raises:
        SliceRefused: the compiler does not know the slice.
        WrongRequest: the program cannot be read, or is for more cores than the slice has.
    """
    devices = devices_of(request)
    module = parse(program)
    mark_aliases(module, request["aliases"])
    replicas, partitions = cores_of(module, request["cores"])
    cores = replicas * partitions
    if cores > len(devices):
        raise WrongRequest(
            f"the program is for {cores} cores; {request['topology']} has {len(devices)}"
        )
    used = devices[:cores]
    options = options_of(used, replicas, partitions, request["effort"])
    started = time.monotonic()
    try:
        executable = compile_module(used, module, options)
    except RuntimeError as error:
        return {"cores": cores, "error": str(error)}
    seconds = time.monotonic() - started
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    return {
        "cores": cores,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "flops": costs.get("flops", 0.0),  # a program without arithmetic may have no entry
        "accessed": costs.get("bytes accessed", 0.0),
        "compile_seconds": seconds,
    }


def compile_module(devices: list, module: ir.Module, options: Any) -> Any:
    """Return the executable; RuntimeError if the compiler rejects the program."""
    client, used = devices[0].client, xla_client.DeviceList(tuple(devices))
    try:
        return client.compile(module, used, options)
    except TypeError:  # before jax 0.10 it takes bytes
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return client.compile(buffer.getvalue(), used, options)


def mark_aliases(module: ir.Module, aliases: list[list[int]]) -> None:
    """Mark those arguments whose memory a result takes over.

    Args:
        module: changed in place.
        aliases: pairs of an argument and a result, by number.
    """
    if not aliases:
        return
    [main] = (f for f in module.body.operations if f.name.value == "main")
    with module.context:
        marks = [{} for _ in main.arguments]
        if "arg_attrs" in main.attributes:
            present: Any = main.attributes["arg_attrs"]
            marks = [{named.name: named.attr for named in mark} for mark in present]
        number = ir.IntegerType.get_signless(32)
        for argument, result in aliases:
            marks[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, result)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(mark) for mark in marks])


def main() -> None:
    """Answer the request in the folder that the command line names."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    program = folder / "program"
    answer: dict[str, Any]
    try:
        if program.exists():
            answer = compile_program(program.read_bytes(), request)
        else:
            answer = {"cores": len(devices_of(request))}
    except SliceRefused as error:
        answer = {"slice_refused": str(error)}
    except WrongRequest as error:
        answer = {"wrong": str(error)}
    answer["libtpu"] = metadata.version("libtpu")
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
