"""From what the compiler leaves behind to a :class:`~.report.Report`."""

from ..engine.tpu_specs import Topology
from ..monitor import layers
from . import hlo
from .report import Report

_LARGEST = 10  # buffers that are named


def refused(refusal: hlo.Refusal, about: dict, text: str = "") -> Report:
    """Return the report of a program that does not fit.

    Args:
        refusal: the compiler's message, read.
        about: fields of the report that the request settles.
        text: the program as far as it was compiled; names the largest arrays if the message,
            like that of libtpu 0.0.52, does not.
    """
    return Report(
        **about,
        compiles=False,
        fits=False,
        hbm_bytes=refusal.used,
        hbm_limit_bytes=refusal.limit,
        buffers=refusal.buffers[:_LARGEST] or _largest(hlo.instructions(text) if text else []),
    )


def accepted(answer: dict, text: str, about: dict, slice_: Topology) -> Report:
    """Return the report of a compiled program.

    Args:
        answer: sizes, costs and seconds of :mod:`~tpuscope.aot.worker`.
        text: the compiled program.
        about: fields of the report that the request settles.
        slice_: what it was compiled for.
    """
    steps = hlo.instructions(text)
    moved = sum(step.moved for step in steps)
    unpadded = sum(step.moved_unpadded for step in steps)
    seconds, bound = slice_.chip.roofline(answer["flops"], answer["accessed"])
    taken = ("arguments", "outputs", "temporaries", "code")
    sizes = {f"{name}_bytes": answer[name] for name in (*taken, "aliased", "peak")}
    usable = slice_.chip.usable
    needed = sum(answer[name] for name in taken) - answer["aliased"]
    return Report(
        **about,
        **sizes,
        compiles=True,
        fits=needed <= usable,
        hbm_bytes=needed,
        hbm_limit_bytes=usable,
        bytes_accessed=answer["accessed"],
        padding=moved / unpadded if unpadded else 1.0,
        flops=answer["flops"],
        cycles=sum(step.cycles for step in steps),
        roofline_seconds=seconds,
        bound=bound,
        layers=_by_layer(steps),
        buffers=_largest(steps),
        collectives=hlo.collectives(text),
        compile_seconds=answer["compile_seconds"],
    )


def _by_layer(steps: list[hlo.Instruction]) -> list[dict]:
    found: dict[str, dict] = {}
    for step in steps:
        name = layers.layer_of(step.operation).removesuffix(layers.GRADIENT)
        layer = found.setdefault(name, {"layer": name, "bytes": 0, "cycles": 0, "largest_bytes": 0})
        layer["bytes"] += step.moved
        layer["cycles"] += step.cycles
        largest = max((array.size for array in step.results), default=0)
        layer["largest_bytes"] = max(layer["largest_bytes"], largest)
    return sorted(found.values(), key=lambda layer: -layer["bytes"])


def _largest(steps: list[hlo.Instruction]) -> list[dict]:
    found = [(array, step) for step in steps for array in step.results]
    found.sort(key=lambda pair: -pair[0].size)
    return [
        {
            "operation": step.operation or step.kind,
            "shape": array.shape,
            "bytes": array.size,
            "unpadded_bytes": array.unpadded,
        }
        for array, step in found[:_LARGEST]
    ]
