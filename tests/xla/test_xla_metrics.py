"""Pasted metrics reports: whole, torn, from other releases, and none at all."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tpuscope.engine import metrics
from tpuscope.monitor.watch import NoMetrics, from_text

# As torch_xla 2.9.0 prints it, shortened; names of other releases and runtimes are in it.
REPORT = """\
Metric: CompileTime
  TotalSamples: 40
  Accumulator: 01m03s457ms789.012us
  ValueRate: 958ms160.013us / second
  Rate: 9.73521 / second
  Percentiles: 1%=012ms577.355us; 5%=012ms577.355us; 99%=200ms575.643us
Metric: ExecuteReplicatedTime
  TotalSamples: 100
  Accumulator: 02s073.537us
Metric: InboundData
  TotalSamples: 60
  Accumulator: 1.21GB
Metric: OutboundData
  TotalSamples: 27
  Accumulator: 486.31KB
Metric: TransferFromServerTime
  TotalSamples: 60
  Accumulator: 041ms329.964us
Metric: TransferToServerTime
  TotalSamples: 27
  Accumulator: 301.193us
Counter: CachedCompile
  Value: 60
Counter: CreateXlaTensor
  Value: 228
Counter: MarkStep
  Value: 20
Counter: UncachedCompile
  Value: 40
Counter: xla::_to_cpu
  Value: 55
Counter: aten::_local_scalar_dense
  Value: 20
Counter: aten::nonzero
  Value: 35
"""


def test_a_report_is_read_with_its_units_and_old_names():
    c = metrics.parse(REPORT)
    assert (c.compilations, c.executions, c.steps, c.cache) == (40, 100, 20, (60, 40))
    assert c.compile_seconds == pytest.approx(63.456789012)
    assert c.execute_seconds == pytest.approx(2.000073537)
    assert c.fallbacks == {"nonzero": 35}
    assert (c.scalar_reads, c.host_reads) == (20, 25)  # 60 transfers, 55 of them for fallbacks
    assert c.brief() == metrics.Counters(compilations=40, fallbacks=35, host_reads=25)
    assert c.from_device == metrics.Transfers(60, pytest.approx(0.041329964), 1.21 * 1024**3)
    assert c.to_device == metrics.Transfers(27, pytest.approx(301.193e-6), 486.31 * 1024)
    assert c.persistent_cache is None


def test_its_verdicts_need_neither_steps_nor_lines():
    report = from_text(REPORT)
    print(report)
    fallback, recompiled, reads = report.verdicts
    assert "nonzero" in fallback and "35" in fallback
    assert "40 of 100" in recompiled
    assert "25" in reads and "20" in reads


def test_quoted_and_unindented_text_is_read_as_well():
    quoted = "\n".join("> " + line for line in REPORT.splitlines())
    bare = "\r\n".join(line.strip() for line in REPORT.splitlines())
    assert metrics.parse(quoted) == metrics.parse(bare) == metrics.parse(REPORT)


@given(first=st.integers(0, len(REPORT)), length=st.integers(0, len(REPORT)))
def test_any_part_of_a_report_gives_what_is_in_it_or_says_that_there_is_nothing(first, length):
    part = REPORT[first : first + length]
    try:
        report = from_text(part)
    except NoMetrics as error:
        assert "metrics report" in str(error) and "\n" not in str(error)
        return
    assert str(report)
    whole = metrics.parse(REPORT)
    # The last number may be torn; all others are those of the whole.
    torn = [n for n, v in report.counts.counters.items() if v != whole.counters.get(n)]
    assert len(torn) <= 1


def test_a_number_that_is_missing_is_unknown_and_not_zero():
    c = metrics.parse("Metric: CompileTime\n  TotalSamples: 3\n")
    assert c.compilations == 3 and c.compile_seconds is None
    assert "? " in str(from_text("Metric: CompileTime\n  TotalSamples: 3\n")).replace("?\n", "? ")


@pytest.mark.parametrize("text", ["", "Hello", "Traceback (most recent call last):\n  File x"])
def test_a_text_that_is_none_is_refused_with_what_to_paste(text):
    with pytest.raises(NoMetrics, match=r"no metrics report.*metrics_report\(\)"):
        from_text(text)


def printed_time(nanoseconds):
    """As torch_xla prints it: from the largest unit that is there, each part rounded."""
    parts, value = [], float(nanoseconds)
    for name, size in (("d", 86400e9), ("h", 3600e9), ("m", 60e9), ("s", 1e9), ("ms", 1e6)):
        if value >= size or parts:
            assume(abs(value / size % 1 - 0.5) > 1e-6)  # it may have been rounded either way
            parts.append(f"{value / size:0{3 if name == 'ms' else 2}.0f}{name}")
            value -= value // size * size
    return "".join(parts) + f"{value / 1e3:07.3f}us"


@given(st.integers(0, 10**16))
def test_times_are_read_as_they_are_printed(nanoseconds):
    assert metrics.quantity(printed_time(nanoseconds)) == pytest.approx(nanoseconds * 1e-9)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("041ms574.012us", 0.040574012),  # seen: metric_data() had 40574012 ns
        ("041ms329.964us", 0.041329964),
        ("01m03s456ms.789us", 63.456000789),
        ("000.900us", 9e-7),
    ],
)
def test_times_that_were_seen(text, seconds):
    assert metrics.quantity(text) == pytest.approx(seconds)


@given(st.floats(0, 1023.99), st.sampled_from(["B", "KB", "MB", "GB", "TB"]))
def test_sizes_are_read_as_they_are_printed(number, unit):
    text = f"{number:.2f}{unit}"
    power = ["B", "KB", "MB", "GB", "TB"].index(unit)
    assert metrics.quantity(text) == pytest.approx(float(f"{number:.2f}") * 1024**power)


@given(st.text(max_size=30))
def test_any_text_is_a_quantity_or_none(text):
    assert metrics.quantity(text) is None or metrics.quantity(text) >= 0


def test_a_total_that_one_report_lacks_is_unknown_in_the_difference():
    before = metrics.Counts({}, {"CompileTime": metrics.Metric(1, None)})
    after = metrics.Counts({}, {"CompileTime": metrics.Metric(3, 9.0)})
    assert (after - before).metrics == {"CompileTime": metrics.Metric(2, None)}
    assert (after - before).compile_seconds is None


def test_counts_are_subtracted_by_name_and_what_did_not_change_is_left_out():
    before = metrics.Counts({"a": 1, "b": 2}, {"m": metrics.Metric(1, 5.0)})
    after = metrics.Counts(
        {"a": 1, "b": 5, "c": 7}, {"m": metrics.Metric(3, 9.0), "n": metrics.Metric(2, 1.0)}
    )
    did = after - before
    assert did.counters == {"b": 3, "c": 7}
    assert did.metrics == {"m": metrics.Metric(2, 4.0), "n": metrics.Metric(2, 1.0)}
