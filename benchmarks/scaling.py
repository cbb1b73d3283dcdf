"""Estimate MSHNet's training step on TPU v5e for 1 to 256 cores, from the TPU compiler's costs.

libtpu holds the whole TPU compiler and needs no TPU for compiling. So the step is traced on virtual
cores, compiled for v5e, and the compiled program says what a core computes, moves and stores, and
what the cores reduce together. The rest is arithmetic: a bound, not a measurement. A step takes at
least the longer of

* floating-point operations / peak
* bytes accessed / HBM bandwidth

and then its all-reduces, as if nothing of them were hidden behind computation:

* bytes, as in a ring: 2 (n - 1) / n x bytes / bandwidth of one link in one direction
* latency: as many hops as it takes along both axes of the slice and back, for each all-reduce

Left out: the host that loads and uploads batches, evaluation, and what the compiler would do with
more effort. A program takes about a minute and 3 GB of the host's memory.
"""

import argparse
from dataclasses import dataclass

from mshnet import RequestError, estimate
from tpuscope.aot.report import Report
from tpuscope.engine.tpu_specs import CHIPS

CHIP = CHIPS["v5e"]
LINK = CHIP.links / 4 / 2  # bytes a second: four links, both directions

# A hop of 1 us is the theory of https://jax-ml.github.io/scaling-book/sharding/; the profile that
# it shows has 3 hops in 8 us.
HOP = 8e-6 / 3

SLICES = {1: (1, 1), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}


@dataclass(frozen=True)
class Compiled:
    """The compiler's costs of one step on one core.

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

    @classmethod
    def of(cls, report: Report) -> "Compiled":
        """Return the costs in a compiler's report."""
        reduced = [found for found in report.collectives if found["kind"] == "all-reduce"]
        return cls(
            flops=report.flops,
            accessed=report.bytes_accessed,
            stored=report.hbm_bytes,
            all_reduces=sum(found["count"] for found in reduced),
            reduced=sum(found["bytes"] for found in reduced),
        )


def reduce_seconds(cores: int, compiled: Compiled) -> float:
    """Return the seconds of all all-reduces of a step, one after the other."""
    rows, columns = SLICES[cores]
    ring = 2 * (cores - 1) / cores * compiled.reduced / LINK
    hops = 2 * (rows - 1 + columns - 1)
    return ring + compiled.all_reduces * hops * HOP


def step_seconds(cores: int, compiled: Compiled) -> float:
    """Return the least seconds of a step."""
    alone, _ = CHIP.roofline(compiled.flops, compiled.accessed)
    return alone + reduce_seconds(cores, compiled)


HEAD = (
    "cores", "batch a core", "global batch", "HBM, GB", "flops / peak, ms", "bytes / bandwidth, ms",
    "all-reduces, ms", "step at least, ms", "images/s at most", "of it a core",
)  # fmt: skip


def table(rows: list[tuple[int, int, Compiled | None]]) -> str:
    """Return a Markdown table; rows are cores, batch of a core, and the program (None: no fit)."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for cores, batch, compiled in rows:
        line = [cores, batch, cores * batch]
        if compiled is None:
            line += ["does not fit", *"–" * 6]
        else:
            seconds = step_seconds(cores, compiled)
            times = (
                compiled.flops / CHIP.peak,
                compiled.accessed / CHIP.bandwidth,
                reduce_seconds(cores, compiled),
                seconds,
            )
            line += [f"{compiled.stored / 1e9:.1f}", *(f"{1000 * t:.1f}" for t in times)]
            line += [f"{cores * batch / seconds:,.0f}", f"{batch / seconds:,.0f}"]
        lines.append(line)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _answer(cores: int, batch: int, size: int, precision: str) -> Compiled | None:
    rows, columns = SLICES[cores]
    overrides = {"batch_size": cores * batch, "base_size": size, "precision": precision}
    step = estimate.request(overrides, "train", f"v5e:{rows}x{columns}")
    report = estimate.compile_step(step)
    return Compiled.of(report) if report.fits else None


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
    rows = [(cores, batch) for batch in options.core_batch for cores in options.cores]
    rows += [
        (cores, size // cores)
        for size in options.global_batch
        for cores in options.cores
        if size % cores == 0
    ]
    answers: dict[tuple[int, int], Compiled | None] = {}
    for cores, batch in rows:
        key = min(cores, options.compile_up_to), batch
        if key not in answers:
            try:
                answers[key] = _answer(*key, options.size, options.precision)
            except RequestError as error:
                parser.exit(2, f"{error}\n")
            print(f"{key[0]} cores, {batch} images each: {answers[key]}", flush=True)
    print(table([(c, b, answers[min(c, options.compile_up_to), b]) for c, b in rows]))


if __name__ == "__main__":
    main()
