"""Published figures, names of slices, and the arithmetic of a roofline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuscope import versions
from tpuscope.engine import tpu_specs
from tpuscope.engine.tpu_specs import CHIPS, Topology, UnknownTopology

amounts = st.floats(1.0, 1e15)


def test_every_name_is_understood_and_given_back():
    assert len(tpu_specs.names()) == len(set(tpu_specs.names()))
    assert [str(Topology.parse(name)) for name in tpu_specs.names()] == tpu_specs.names()


@pytest.mark.parametrize(
    ("name", "cores"),
    [("v5e:1x1", 1), ("v5e:2x4", 8), ("v2:2x2", 8), ("v5p:2x2x1", 4), ("tpu7x:2x2x1", 8)],
)
def test_a_slice_has_its_chips_cores(name, cores):
    assert Topology.parse(name).cores == cores


@pytest.mark.parametrize(
    "name",
    [
        "v7:1x1",
        "7x:2x2x1",
        "v7x:2x2x1",
        "tpu7:2x2x1",
        "tpuv5e:1x1",
        "v5e",
        "v5e:",
        "v5e:2",
        "2x4",
        "",
        "V5E:1x1",
    ],
)
def test_an_unknown_generation_names_all_that_are_known(name):
    with pytest.raises(UnknownTopology) as error:
        Topology.parse(name)
    assert error.value.code == "unknown-topology"
    assert "v2:2x2" in str(error.value) and "v6e:16x16" in str(error.value)


def test_an_unknown_slice_names_those_of_its_generation():
    with pytest.raises(UnknownTopology, match="v5e:3x1") as raised:
        Topology.parse("v5e:3x1")
    assert "v5e:2x4" in str(raised.value) and "v6e" not in str(raised.value)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_a_program_may_use_most_of_its_cores_memory_but_not_more(chip):
    # v5p's page has 95 GiB, its compiler a little more.
    assert 0.9 <= chip.usable * chip.cores / chip.hbm <= 1.01
    assert chip.source.startswith("https://")


def test_half_of_a_tpu7x_is_a_core():
    chip = CHIPS["7x"]
    assert (chip.cores, chip.hbm / chip.cores) == (2, 96 * tpu_specs.GIB)
    assert Topology.parse("tpu7x:2x2x1").chip is chip
    assert chip.libtpu == versions.NEWEST_LIBTPU  # the project's own does not know it
    assert chip.roofline(1153.5e12, 0) == (pytest.approx(1), "compute")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_a_core_has_its_share_of_the_chip(chip):
    one_second = chip.peak / chip.cores
    assert chip.roofline(one_second, 1.0) == (pytest.approx(1), "compute")
    one_second = chip.bandwidth / chip.cores
    assert chip.roofline(1.0, one_second) == (pytest.approx(1), "memory")


@given(st.sampled_from(list(CHIPS.values())), amounts, amounts, st.floats(1.0, 100.0))
def test_more_work_never_takes_less_time(chip, flops, accessed, factor):
    seconds, bound = chip.roofline(flops, accessed)
    assert chip.roofline(flops * factor, accessed)[0] >= seconds
    assert chip.roofline(flops, accessed * factor)[0] >= seconds
    assert bound in ("memory", "compute")
