"""Read a program that XLA has compiled for a TPU, and the message when it does not fit.

A compiled program is a list of instructions. Most are fusions: many operations that run as one,
whose arguments are read from HBM and whose results are written there. An array in HBM is kept in
tiles, 8 × 128 elements for most, and what does not fill a tile is padding that moves all the same.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

# Bytes of an element; types that are not listed have their bits in their names.
_BYTES = {"pred": 1, "c64": 8, "c128": 16, "token": 0}

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")

# These give a name to what is there already, or begin what another instruction ends.
_MOVE_NOTHING = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "optimization-barrier",
    "partition-id",
    "replica-id",
}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Array:
    """An array as the compiler lays it out.

    Attributes:
        shape: with its layout, as in the program: ``f32[8,16,64,64]{1,0,3,2:T(8,128)}``.
        size: bytes in memory.
        unpadded: bytes of its elements.
        in_hbm: whether it lies in HBM rather than in a memory on the core.
    """

    shape: str
    size: int
    unpadded: int
    in_hbm: bool


def arrays(text: str) -> list[Array]:
    """Return the arrays of a shape; several if it is a tuple."""
    return [_array(*found.group(0, 1, 2, 3)) for found in _ARRAY.finditer(text)]


def _array(shape: str, kind: str, dimensions: str, layout: str | None) -> Array:
    sides = [int(side) for side in dimensions.split(",") if side]
    element = element_bytes(kind)
    order, _, details = (layout or "").partition(":")
    padded = list(sides)
    tile = re.search(r"T\(([\d,]+)\)", details)
    if tile and sides:
        # A layout names the dimensions from the fastest to the slowest; so do tiles, backwards.
        fastest = [int(axis) for axis in order.split(",")]
        for axis, length in zip(fastest, reversed(tile[1].split(","))):
            padded[axis] = math.ceil(sides[axis] / int(length)) * int(length)
    return Array(
        shape=shape,
        size=math.ceil(math.prod(padded) * element),
        unpadded=math.ceil(math.prod(sides) * element),
        in_hbm=not re.search(r"S\([1-9]\d*\)", details),
    )


def element_bytes(kind: str) -> float:
    """Return the bytes of an element of an XLA type such as ``bf16``."""
    if kind in _BYTES:
        return _BYTES[kind]
    bits = re.search(r"\d+", kind)
    if bits is None:
        raise ValueError(f"{kind} is no XLA type")
    return int(bits[0]) / 8


@dataclass(frozen=True)
class Instruction:
    """One step of a compiled program.

    Attributes:
        name: in the program.
        kind: of the operation, such as ``fusion``.
        operation: name of the traced operation that it computes, or the last of several. Copies
            into another layout, which the compiler adds, have the name of what they read.
        results: in HBM.
        moved: bytes read from and written to HBM.
        moved_unpadded: the same without padding.
        cycles: expected by the compiler; 0 if it gives none.
    """

    name: str
    kind: str
    operation: str
    results: tuple[Array, ...]
    moved: int
    moved_unpadded: int
    cycles: int


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a compiled program that move data, in the order they run.

    The body of a loop counts once: how often it runs is not known.
    """
    computations, entry = _computations(text)
    return list(_follow(computations, entry))


def _computations(text: str) -> tuple[dict[str, list[re.Match]], str]:
    computations: dict[str, list[re.Match]] = {}
    entry = lines = None
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            lines = computations[begins[2]] = []
            entry = begins[2] if begins[1] else entry
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            lines.append(found)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a compiled program")
    return computations, entry


def _follow(computations: dict[str, list[re.Match]], name: str) -> Iterator[Instruction]:
    arrays_of: dict[str, list[Array]] = {}
    operations: dict[str, str] = {}
    for found in computations[name]:
        label, shape, kind, rest = found.groups()
        arrays_of[label] = arrays(shape)
        results = tuple(array for array in arrays_of[label] if array.in_hbm)
        # libtpu 0.0.52 writes %fusion#1 for an element of a tuple, 0.0.21 a get-tuple-element.
        elements = re.findall(r"%([\w.-]+)(?:#(\d+))?", rest[: rest.index(")")])
        operands = [name for name, _ in elements]
        named = re.search(r'op_name="([^"]*)"', rest)
        inherited = (operations[name] for name in operands if operations.get(name))
        operations[label] = named[1] if named else next(inherited, "")
        if kind in ("while", "conditional", "call"):
            called = re.findall(r"(?:body|condition|to_apply|_computation)=%([\w.-]+)", rest)
            called += re.findall(
                r"%([\w.-]+)", "".join(re.findall(r"computations=\{(.*?)\}", rest))
            )
            for inner in called:
                yield from _follow(computations, inner)
            continue
        if kind in _MOVE_NOTHING or kind.endswith("-done"):
            continue
        if kind == "copy-start":
            results = results[:1]  # the others are what it reads, and a flag
        read = (_element(arrays_of.get(name, []), number) for name, number in elements)
        moved = [*results, *(array for found in read for array in found if array.in_hbm)]
        cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
        yield Instruction(
            name=label,
            kind=kind,
            operation=operations[label],
            results=results,
            moved=sum(array.size for array in moved),
            moved_unpadded=sum(array.unpadded for array in moved),
            cycles=int(cycles[1]) if cycles else 0,
        )


def _element(found: list[Array], number: str) -> list[Array]:
    """Return one array of a tuple; all of them without a number."""
    return found[int(number) : int(number) + 1] if number else found


def collectives(text: str) -> list[dict]:
    """Return what the cores exchange: ``kind``, ``count``, ``bytes`` (of the results, unpadded)."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for kind in _COLLECTIVES:
        for shape in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
            counts[kind] += 1
            sizes[kind] += sum(array.unpadded for array in arrays(shape))
    return [{"kind": kind, "count": counts[kind], "bytes": sizes[kind]} for kind in counts]


@dataclass(frozen=True)
class Refusal:
    """A program that does not fit into memory.

    Attributes:
        used: bytes that it needs, as rounded by the compiler.
        limit: bytes that are usable.
        buffers: the largest: ``operation``, ``shape``, ``bytes``, ``unpadded_bytes``; empty if the
            message does not list them.
    """

    used: int
    limit: int
    buffers: list[dict]


def refusal(message: str) -> Refusal | None:
    """Read the compiler's message; return None if it is about anything but HBM."""
    # libtpu 0.0.21, and 0.0.52.
    amounts = re.search(r"Used (\S+) of (\S+) hbm", message) or re.search(
        r"\((\S+)\) exceeds available HBM \((\S+)\)", message
    )
    if "RESOURCE_EXHAUSTED" not in message or not amounts:
        return None
    listed = re.findall(
        r"Size: (\S+)\n(?:\s+Operator: op_name=\"([^\"]*)\".*\n)?\s+Shape: (\S.*)\n"
        r"\s+Unpadded size: (\S+)",
        message,
    )
    buffers = [
        {
            "operation": operation,
            "shape": shape,
            "bytes": _amount(size),
            "unpadded_bytes": _amount(unpadded),
        }
        for size, operation, shape, unpadded in listed
    ]
    return Refusal(_amount(amounts[1]), _amount(amounts[2]), buffers)


def _amount(text: str) -> int:
    """Return the bytes of an amount such as ``20.00G``, ``170.5K`` or ``512B``."""
    found = re.fullmatch(r"([\d.]+)([BKMGT]?)B?\.?", text)
    if found is None:
        raise ValueError(f"{text} is no amount of memory")
    return round(float(found[1]) * 1024 ** "BKMGT".index(found[2] or "B"))
