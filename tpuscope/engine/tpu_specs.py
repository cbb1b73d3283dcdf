"""TPU chips by generation: published figures, usable memory, and slices that compile.

A roofline is arithmetic with these: a program takes at least as long as its operations at peak
rate, and at least as long as its bytes at full bandwidth.
"""

import math
import re
from dataclasses import dataclass

from .. import versions
from ..errors import RequestError

GIB = 2**30


class UnknownTopology(RequestError):
    """No TPU slice has this name, or none that the compiler is known to accept."""

    def __init__(self, message: str, code: str = "unknown-topology"):
        super().__init__(message, code)


@dataclass(frozen=True)
class Chip:
    """One generation. Figures are of a whole chip unless the line names a core.

    A core is what XLA calls a device. v2, v3, v4 and 7x chips have two TensorCores, which the
    compiler takes as two cores with half of the chip each; v5p's two work as one.

    Attributes:
        generation: as topologies name it, such as ``"v5e"``.
        cores: on a chip.
        peak: bfloat16 floating-point operations a second.
        hbm: bytes of memory.
        bandwidth: bytes a second between HBM and the cores.
        links: bytes a second to other chips, both directions of all links together; None where
            Google's documentation gives no figure.
        usable: bytes of HBM that a program on one core may take; the rest is reserved. Read from
            the error messages of libtpu 0.0.21.1 ("Used … of 15.75G hbm"), for 7x of 0.0.52
            ("exceeds available HBM (94.74G)"); 0.0.52 has the same for the others, to 0.01 GiB.
        slices: shapes, in chips, that compile with that libtpu.
        source: where the figures are published.
        libtpu: a version that compiles for it, if the project's own does not; else None.
    """

    generation: str
    cores: int
    peak: float
    hbm: float
    bandwidth: float
    links: float | None
    usable: int
    slices: tuple[str, ...]
    source: str
    libtpu: str | None = None

    @property
    def prefix(self) -> str:
        """Name in a topology: the generation; of 7x ``tpu7x``, the only one libtpu accepts."""
        return "tpu7x" if self.generation == "7x" else self.generation

    def roofline(self, flops: float, accessed: float) -> tuple[float, str]:
        """Return the least time that a program takes on one core, and its bottleneck.

        Args:
            flops: floating-point operations of one core.
            accessed: bytes that one core reads from and writes to HBM.

        Returns:
            Seconds, and ``"compute"`` or ``"memory"``.
        """
        compute = flops / (self.peak / self.cores)
        memory = accessed / (self.bandwidth / self.cores)
        return max(compute, memory), "compute" if compute > memory else "memory"


_FLAT = ("2x2", "4x4", "8x8", "8x16", "16x16")
_E = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")
_DOCS = "https://docs.cloud.google.com/tpu/docs/"

CHIPS = {
    chip.generation: chip
    for chip in (
        # Google's page on v2 leaves the figures to this paper, which compares v2 and v3.
        Chip("v2", 2, 46e12, 16 * GIB, 700e9, None, int(7.48 * GIB), ("1x1", *_FLAT),
             "https://dl.acm.org/doi/pdf/10.1145/3360307"),
        Chip("v3", 2, 123e12, 32 * GIB, 900e9, None, int(15.48 * GIB), ("1x1", *_FLAT),
             _DOCS + "v3"),
        Chip("v4", 2, 275e12, 32 * GIB, 1200e9, None, int(15.25 * GIB), _CUBES, _DOCS + "v4"),
        Chip("v5e", 1, 197e12, 16 * GIB, 819e9, 400e9, int(15.75 * GIB), _E, _DOCS + "v5e"),
        Chip("v5p", 1, 459e12, 95 * GIB, 2765e9, 1200e9, int(95.74 * GIB), _CUBES, _DOCS + "v5p"),
        Chip("v6e", 1, 918e12, 32 * GIB, 1638e9, 800e9, int(31.25 * GIB), _E, _DOCS + "v6e"),
        # libtpu 0.0.21.1 answers "Invalid TPU external name: TPU7x".
        Chip("7x", 2, 2307e12, 192 * GIB, 7380e9, None, int(94.74 * GIB), _CUBES, _DOCS + "tpu7x",
             libtpu=versions.NEWEST_LIBTPU),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """A slice: chips of one generation in a rectangle or a box, such as ``v5e:2x4``."""

    chip: Chip
    shape: str

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Return the slice with a name such as ``"v5e:2x4"``.

        Raises:
            UnknownTopology: lists the names that are known.
        """
        prefix, _, shape = name.partition(":")
        chip = next((chip for chip in CHIPS.values() if chip.prefix == prefix), None)
        if chip is None or not re.fullmatch(r"\d+(x\d+)+", shape):
            raise UnknownTopology(f"{name} is not known; choose one of {' '.join(names())}")
        if shape not in chip.slices:
            here = " ".join(f"{prefix}:{known}" for known in chip.slices)
            raise UnknownTopology(f"{name} is not a known slice of {prefix}; use {here}")
        return cls(chip, shape)

    @property
    def sides(self) -> tuple[int, ...]:
        """Chips along each axis."""
        return tuple(int(side) for side in self.shape.split("x"))

    @property
    def cores(self) -> int:
        """Cores of all chips."""
        return math.prod(self.sides) * self.chip.cores

    def __str__(self) -> str:
        return f"{self.chip.prefix}:{self.shape}"


def names() -> list[str]:
    """Return all topologies that are known to compile."""
    return [f"{chip.prefix}:{shape}" for chip in CHIPS.values() for shape in chip.slices]
