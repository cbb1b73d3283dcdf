"""The process that compiles for a TPU: ``python -P worker.py FOLDER``.

It reads ``program.bc`` and ``request.json`` from the folder and leaves ``answer.json`` and, of a
program that fits, the compiled program in ``dump``: the compiler writes it while it works.
(Asking the executable for it takes minutes and up to 40 GB: it reads the machine code back.)

It is a process of its own so that libtpu, which takes gigabytes and aborts on some errors, is never
loaded where a model lives. It imports nothing of the package.
"""

# pyright: reportAttributeAccessIssue=false
# (jaxlib has no types for what its C++ modules add.)
import io
import json
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

LEAST_EFFORT = -1.0  # of a scale from -1 to 1


def compile_program(program: bytes, request: dict) -> dict:
    """Compile StableHLO for the slice that the request names.

    Args:
        program: StableHLO bytecode, as a portable artifact.
        request: ``topology``, ``options`` (of its description), ``cores``, ``effort``, ``aliases``.

    Returns:
        Sizes in bytes, costs, seconds.

    Raises:
        RuntimeError: the compiler rejects it; RESOURCE_EXHAUSTED if the program does not fit.
    """
    slice_ = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["options"]
    )
    cores = request["cores"]
    devices = slice_.devices[:cores]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, cores
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id for device in devices]])
    )
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, cores
    build.device_assignment = options.device_assignment
    build.use_spmd_partitioning = cores > 1
    if request["effort"] == "fast":
        build.exec_time_optimization_effort = build.memory_fitting_effort = LEAST_EFFORT
    module = with_aliases(program, request["aliases"])
    started = time.monotonic()
    executable = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
    seconds = time.monotonic() - started
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "flops": costs["flops"],
        "accessed": costs["bytes accessed"],
        "compile_seconds": seconds,
    }


def with_aliases(program: bytes, aliases: list[list[int]]) -> bytes:
    """Return the program with those arguments marked whose memory a result takes over.

    Args:
        aliases: pairs of an argument and a result, by number.
    """
    context = ir.Context()
    stablehlo.register_dialect(context)
    module = stablehlo.deserialize_portable_artifact(context, program)
    [main] = (f for f in module.body.operations if f.name.value == "main")
    with context:
        marks = list(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else []
        marks = [{a.name: a.attr for a in mark} for mark in marks] or [{} for _ in main.arguments]
        number = ir.IntegerType.get_signless(32)
        for argument, result in aliases:
            marks[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, result)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(mark) for mark in marks])
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = compile_program((folder / "program.bc").read_bytes(), request)
    except RuntimeError as error:
        answer = {"error": str(error)}
    answer["libtpu"] = metadata.version("libtpu")
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
