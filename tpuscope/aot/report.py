"""What the TPU's compiler reports about a program, for programs and for people."""

from dataclasses import asdict, dataclass
from typing import Any

from ..engine import tpu_specs
from ..tables import table


@dataclass(frozen=True)
class Report:
    """What the TPU's compiler reports about a program. All amounts are per core and per step.

    Attributes:
        topology: such as ``"v5e:1x1"``.
        cores: how many run the program together.
        effort: ``"fast"`` or ``"full"``.
        compiles: whether the compiler accepts it; if not, it does not fit, and what is unknown
            then is None.
        fits: whether it compiles and needs at most ``hbm_limit_bytes``. (The compiler itself does
            not count the results.)
        hbm_bytes: needed: arguments + outputs - aliased + temporaries + code; of a program that
            does not compile, what the compiler found before it gave up.
        hbm_limit_bytes: usable by a program.
        arguments_bytes: inputs, parameters, and the optimizer's state.
        outputs_bytes: results; those that replace an argument are among them.
        aliased_bytes: of results that take over their argument's memory.
        temporaries_bytes: everything in between.
        code_bytes: the program itself.
        peak_bytes: held at one time at most, without the code, as the compiler counts it.
        bytes_accessed: read from and written to HBM.
        padding: factor by which tiles that are not full enlarge these bytes.
        flops: floating-point operations, without those on padding.
        cycles: of the core's clock, as the compiler estimates each instruction; good for comparing
            layers, but not a time.
        roofline_seconds: the least time on this chip.
        bound: the bottleneck: ``"memory"`` or ``"compute"``.
        layers: ``layer, bytes, cycles, largest_bytes``, the busiest first; a layer's gradient is
            counted with it.
        buffers: the largest arrays in HBM: ``operation, shape, bytes, unpadded_bytes``.
        collectives: ``kind, count, bytes``.
        compile_seconds: the compiler's time.
        program: digest of what was compiled.
        libtpu: version of the compiler.
        cached: whether this is an earlier answer.
    """

    topology: str
    cores: int
    effort: str
    compiles: bool
    fits: bool
    hbm_bytes: int
    hbm_limit_bytes: int
    program: str
    libtpu: str
    buffers: list[dict]
    arguments_bytes: int | None = None
    outputs_bytes: int | None = None
    aliased_bytes: int | None = None
    temporaries_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    bytes_accessed: float | None = None
    padding: float | None = None
    flops: float | None = None
    cycles: int | None = None
    roofline_seconds: float | None = None
    bound: str | None = None
    layers: list[dict] | None = None
    collectives: list[dict] | None = None
    compile_seconds: float | None = None
    cached: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with ``rooflines`` beside them."""
        return asdict(self) | {"rooflines": self.rooflines()}

    def rooflines(self) -> dict[str, dict]:
        """Return ``seconds`` and ``bound`` of these bytes and operations on every chip's core.

        The other generations' compilers would make another program.
        """
        if not self.compiles:
            return {}
        assert self.flops is not None and self.bytes_accessed is not None
        lines = {
            name: chip.roofline(self.flops, self.bytes_accessed)
            for name, chip in tpu_specs.CHIPS.items()
        }
        return {name: {"seconds": line[0], "bound": line[1]} for name, line in lines.items()}

    def table(self, depth: int = 2, rows: int = 12) -> str:
        """Return the report for people.

        Args:
            depth: parts of a layer's name to show: 1 is the model, 2 its children.
            rows: of each list, at most.
        """
        return _table(self, depth, rows)


def _table(report: Report, depth: int, rows: int) -> str:
    cores = f"{report.cores} core" + "s" * (report.cores > 1)
    lines = [
        f"{report.topology}, {cores}: an estimate by the TPU's compiler, not a run",
        f"(libtpu {report.libtpu}, {report.effort} effort, program {report.program}; figures are a "
        "core's, for one step)",
        "",
        _memory(report),
    ]
    if report.compiles:
        lines += _costs(report)
        others = [("chip", "at least, ms", "bound by")]
        others += [
            (name, f"{1e3 * line['seconds']:.3f}", line["bound"])
            for name, line in report.rooflines().items()
        ]
        lines += [
            "",
            "the same bytes and operations by other chips' figures (their compilers would make "
            "another program):",
            table(others, "<><"),
            "",
            "bytes moved, by layer, forward and backward:",
            table(_layer_rows(report, depth, rows), "<>>>>"),
        ]
    buffers = [("bytes", "of them padding", "shape and layout", "operation")]
    buffers += [
        (
            size(buffer["bytes"]),
            f"{100 * (1 - buffer['unpadded_bytes'] / (buffer['bytes'] or 1)):.0f} %",
            buffer["shape"],
            buffer["operation"],
        )
        for buffer in report.buffers[:rows]
    ]
    lines += ["", "largest arrays in HBM:", table(buffers, ">><<")]
    return "\n".join(lines)


def _memory(report: Report) -> str:
    verdict = "fits" if report.fits else "DOES NOT FIT"
    return (
        f"memory      {verdict}: {size(report.hbm_bytes)} needed, {size(report.hbm_limit_bytes)} "
        "usable"
    )


def _costs(report: Report) -> list[str]:
    exchanged = ", ".join(
        f"{found['count']} {found['kind']} ({size(found['bytes'])})"
        for found in report.collectives or []
    )
    seconds, padding = report.roofline_seconds or 0, report.padding or 1
    return [
        f"            arguments {size(report.arguments_bytes)}, temporaries "
        f"{size(report.temporaries_bytes)}, results {size(report.outputs_bytes)} "
        f"({size(report.aliased_bytes)} in place), code {size(report.code_bytes)}",
        f"moved       {size(report.bytes_accessed)} to and from HBM, {padding:.1f} times "
        "what they hold: the rest is padding",
        f"operations  {(report.flops or 0) / 1e9:,.3f} Gflop",
        f"at least    {1e3 * seconds:,.3f} ms, bound by {report.bound}",
        f"exchanged   {exchanged or 'nothing'}",
        f"compiled    in {report.compile_seconds:.1f} s" + " (an earlier answer)" * report.cached,
    ]


def _layer_rows(report: Report, depth: int, rows: int) -> list[tuple[str, ...]]:
    groups: dict[str, dict] = {}
    for layer in report.layers or []:
        name = ".".join(layer["layer"].split(".")[:depth])
        group = groups.setdefault(name, {"bytes": 0, "cycles": 0, "largest_bytes": 0})
        group["bytes"] += layer["bytes"]
        group["cycles"] += layer["cycles"]
        group["largest_bytes"] = max(group["largest_bytes"], layer["largest_bytes"])
    total = sum(group["bytes"] for group in groups.values()) or 1
    found = sorted(groups.items(), key=lambda pair: -pair[1]["bytes"])
    shown = [("layer", "moved", "of all", "cycles", "largest array")]
    shown += [
        (
            name,
            size(group["bytes"]),
            f"{100 * group['bytes'] / total:.1f} %",
            f"{100 * group['cycles'] / (report.cycles or 1):.1f} %",
            size(group["largest_bytes"]),
        )
        for name, group in found[:rows]
    ]
    if len(found) > rows:
        rest = sum(group["bytes"] for _, group in found[rows:])
        shown.append(
            (f"{len(found) - rows} more", size(rest), f"{100 * rest / total:.1f} %", "", "")
        )
    return shown


def size(number: float | None) -> str:
    """Return bytes for people, in units of 1024 as in the compiler's messages: ``1.50 GiB``."""
    if number is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
