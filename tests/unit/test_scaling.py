"""The arithmetic of ``benchmarks/scaling.py``, against published figures of a v5e."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuscope.aot.report import Report

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"
_spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
scaling = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scaling)

Compiled = scaling.Compiled


def test_one_core_reduces_nothing():
    assert scaling.reduce_seconds(1, Compiled(1, 1, 1, all_reduces=65, reduced=8e6)) == 0


@pytest.mark.parametrize(
    ("cores", "count", "reduced", "milliseconds"),
    [
        # A ring of n moves 2 (n - 1) / n of the bytes, at 50 GB/s in one direction.
        (8, 0, 1e9, 35.0),
        (256, 0, 1e9, 39.84375),
        # 2 × 4 chips are (1 + 3) hops across and as many back, 16 × 16 chips 30; 8 us for 3 hops.
        (8, 30, 0, 0.64),
        (256, 30, 0, 4.8),
        (8, 30, 1e9, 35.64),
    ],
)
def test_an_all_reduce_moves_its_bytes_around_a_ring_and_crosses_the_slice_and_back(
    cores, count, reduced, milliseconds
):
    compiled = Compiled(1, 1, 1, count, reduced)
    assert 1e3 * scaling.reduce_seconds(cores, compiled) == pytest.approx(milliseconds)


# A v5e computes 197 Tflop/s in bfloat16 and moves 819 GB/s (cloud.google.com/tpu/docs/v5e).
@pytest.mark.parametrize(("flops", "accessed"), [(394e12, 1), (1, 1638e9), (394e12, 1638e9)])
def test_the_slower_of_computing_and_moving_bounds_the_step(flops, accessed):
    assert scaling.step_seconds(1, Compiled(flops, accessed, 1)) == pytest.approx(2)


@given(
    flops=st.floats(1e9, 1e14),
    accessed=st.floats(1e9, 1e12),
    count=st.integers(1, 1000),
    reduced=st.floats(1, 1e9),
)
def test_more_cores_never_make_a_step_of_the_same_program_shorter(flops, accessed, count, reduced):
    compiled = Compiled(flops, accessed, 1e9, count, reduced)
    times = [scaling.step_seconds(cores, compiled) for cores in sorted(scaling.SLICES)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_a_slice_has_as_many_chips_as_its_name():
    assert all(rows * columns == cores for cores, (rows, columns) in scaling.SLICES.items())


def test_the_table_has_a_line_for_each_row_and_says_what_does_not_fit():
    compiled = Compiled(flops=1.97e12, accessed=81.9e9, stored=2.5e9)
    head, rule, fits, too_large = scaling.table([(1, 32, compiled), (1, 256, None)]).splitlines()
    assert head.count("|") == rule.count("|") == fits.count("|") == too_large.count("|")
    cells = [cell.strip() for cell in fits.strip("|").split("|")]
    assert cells == ["1", "32", "32", "2.5", "10.0", "100.0", "0.0", "100.0", "320", "320"]
    assert "does not fit" in too_large


def test_only_all_reduces_of_a_report_count_as_such():
    report = Report(
        topology="v5e:2x4",
        cores=8,
        effort="fast",
        compiles=True,
        fits=True,
        hbm_bytes=3,
        hbm_limit_bytes=4,
        program="",
        libtpu="",
        buffers=[],
        bytes_accessed=2.0,
        flops=1.0,
        collectives=[
            {"kind": "all-reduce", "count": 65, "bytes": 800},
            {"kind": "all-gather", "count": 2, "bytes": 9},
        ],
    )
    assert Compiled.of(report) == Compiled(1.0, 2.0, 3, all_reduces=65, reduced=800)
