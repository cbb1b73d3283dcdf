"""Reading compiled programs: arrays with their padding, instructions, collectives, refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuscope.aot import hlo

# The form of a program for v5e, shortened.
PROGRAM = """\
HloModule step, is_scheduled=true

%fused_computation.1 (param_0.1: f32[8,64]) -> f32[8,64] {
  %param_0.1 = f32[8,64]{1,0:T(8,128)} parameter(0)
  ROOT %add.9 = f32[8,64]{1,0:T(8,128)} add(%param_0.1, %param_0.1), metadata={op_name="inner"}
}

%body.1 (carry.1: (f32[8,64])) -> (f32[8,64]) {
  %carry.1 = (f32[8,64]{1,0:T(8,128)}) parameter(0)
  %element.1 = f32[8,64]{1,0:T(8,128)} get-tuple-element(%carry.1), index=0
  %negate.1 = f32[8,64]{1,0:T(8,128)} negate(%element.1), metadata={op_name="Net.loop/aten__neg"}
  ROOT %tuple.1 = (f32[8,64]{1,0:T(8,128)}) tuple(%negate.1)
}

%condition.1 (carry.2: (f32[8,64])) -> pred[] {
  %carry.2 = (f32[8,64]{1,0:T(8,128)}) parameter(0)
  ROOT %constant.1 = pred[]{:T(512)} constant(false)
}

ENTRY %main.5 (Arg_0.1: f32[8,64], Arg_1.2: bf16[16]) -> (f32[8,64]) {
  %Arg_0.1 = f32[8,64]{1,0:T(8,128)} parameter(0), metadata={op_name="Net.a/xla__device_data"}
  %Arg_1.2 = bf16[16]{0:T(256)(128)(2,1)} parameter(1)
  %copy.1 = f32[8,64]{0,1:T(8,128)} copy(%Arg_0.1), backend_config={"estimated_cycles":"100"}
  %fusion.1 = (f32[8,64]{1,0:T(8,128)}, f32[8,64]{1,0:T(8,128)S(1)}) fusion(%copy.1, \
/*index=1*/%Arg_1.2), kind=kLoop, calls=%fused_computation.1, \
metadata={op_name="Net.b/grad/aten__mul"}, backend_config={"estimated_cycles":"250"}
  %element.2 = f32[8,64]{1,0:T(8,128)} get-tuple-element(%fusion.1), index=0
  %all-reduce.1 = (f32[8,64]{1,0:T(8,128)}, f32[]{:T(128)}) all-reduce(%element.2, %element.2)
  %all-reduce-start.1 = bf16[16]{0:T(256)} all-reduce-start(%Arg_1.2), channel_id=2
  %all-reduce-done.1 = bf16[16]{0:T(256)} all-reduce-done(%all-reduce-start.1)
  %all-gather.1 = f32[64,64]{1,0:T(8,128)} all-gather(%element.2), dimensions={0}
  %tuple.2 = (f32[8,64]{1,0:T(8,128)}) tuple(%element.2)
  ROOT %while.1 = (f32[8,64]{1,0:T(8,128)}) while(%tuple.2), condition=%condition.1, body=%body.1
}
"""
TILE = 8 * 128 * 4  # an f32[8,64] fills half of it


def by_name(text):
    return {step.name: step for step in hlo.instructions(text)}


@pytest.mark.parametrize(
    ("shape", "size", "unpadded"),
    [
        ("f32[8,128]{1,0:T(8,128)}", 4096, 4096),
        ("f32[8,64]{1,0:T(8,128)}", 4096, 2048),
        ("f32[8,64]{0,1:T(8,128)}", 64 * 128 * 4, 2048),  # the other way round
        # 16 channels × 32 images at 256×256: the images fill a quarter of the lanes.
        ("bf16[32,16,256,256]{0,1,3,2:T(8,128)(2,1)}", 4 * 67108864, 67108864),
        ("f32[]{:T(128)}", 4, 4),
        ("f32[16]{0:T(128)}", 512, 64),
        ("pred[3]{0}", 3, 3),
        ("s4[10]{0}", 5, 5),
        ("f8e4m3fn[10]{0}", 10, 10),
        ("u8[7,3]", 21, 21),
    ],
)
def test_an_array_takes_whole_tiles(shape, size, unpadded):
    [array] = hlo.arrays(shape)
    assert (array.size, array.unpadded, array.in_hbm) == (size, unpadded, True)


def test_a_tuple_has_several_arrays_and_some_are_not_in_hbm():
    first, second = hlo.arrays("(f32[8]{0:T(128)S(1)}, /*index=1*/bf16[4,4]{1,0:T(8,128)(2,1)})")
    assert (first.in_hbm, second.in_hbm) == (False, True)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4).flatmap(
        lambda sides: st.tuples(st.just(sides), st.permutations(range(len(sides))))
    ),
    st.sampled_from(["f32", "bf16", "s32", "pred"]),
)
def test_padding_adds_and_never_takes_away(sides_and_order, kind):
    sides, order = sides_and_order
    tile = "8,128" if len(sides) > 1 else "128"
    dimensions, layout = (",".join(map(str, numbers)) for numbers in (sides, order))
    [array] = hlo.arrays(f"{kind}[{dimensions}]{{{layout}:T({tile})}}")
    assert array.unpadded == math.prod(sides) * hlo.element_bytes(kind)
    assert array.unpadded <= array.size
    assert array.size % (128 * hlo.element_bytes(kind)) == 0


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="not a compiled program"):
        hlo.instructions("HloModule empty")


def test_only_what_moves_data_is_listed_and_the_inside_of_a_fusion_is_not():
    assert list(by_name(PROGRAM)) == [
        "copy.1", "fusion.1", "all-reduce.1", "all-reduce-start.1", "all-gather.1", "negate.1",
    ]  # fmt: skip


def test_an_instruction_moves_what_it_reads_and_what_it_writes_to_hbm():
    steps = by_name(PROGRAM)
    transposed = 64 * 128 * 4
    assert steps["copy.1"].moved == TILE + transposed
    assert steps["copy.1"].moved_unpadded == 2 * 2048
    assert steps["fusion.1"].moved == transposed + 512 + TILE  # its other result stays on the core
    assert [array.size for array in steps["fusion.1"].results] == [TILE]
    assert steps["negate.1"].moved == 2 * TILE  # in the body of a loop


def test_an_element_of_a_tuple_is_read_alone_in_both_ways_to_write_it():
    newer = PROGRAM.replace("all-gather(%element.2)", "all-gather(%fusion.1#0)")
    assert newer != PROGRAM
    assert by_name(newer)["all-gather.1"] == by_name(PROGRAM)["all-gather.1"]
    elsewhere = PROGRAM.replace("all-gather(%element.2)", "all-gather(%fusion.1#1)")
    result = 64 * 128 * 4
    assert by_name(newer)["all-gather.1"].moved == result + TILE
    assert by_name(elsewhere)["all-gather.1"].moved == result


def test_an_instruction_has_its_operations_name_or_that_of_what_it_reads():
    steps = by_name(PROGRAM)
    assert steps["fusion.1"].operation == "Net.b/grad/aten__mul"
    assert steps["negate.1"].operation == "Net.loop/aten__neg"
    assert steps["copy.1"].operation == "Net.a/xla__device_data"
    assert steps["all-gather.1"].operation == "Net.b/grad/aten__mul"
    assert (steps["copy.1"].cycles, steps["fusion.1"].cycles) == (100, 250)


def test_collectives_are_counted_by_kind_with_the_bytes_of_all_their_results():
    assert hlo.collectives(PROGRAM) == [
        {"kind": "all-reduce", "count": 2, "bytes": 2048 + 4 + 32},
        {"kind": "all-gather", "count": 1, "bytes": 64 * 64 * 4},
    ]
    assert hlo.collectives("no collectives here") == []


MESSAGE = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.

  Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="Net.conv/aten__convolution" source_file="/home/me/net.py"
     Shape: f32[2048,16,256,256]{0,1,3,2:T(8,128)}
     Unpadded size: 1.50G
     Allocation type: HLO temp
     ==========================

  2. Size: 170.5K
     Shape: f32[16]{0:T(128)}
     Unpadded size: 64B
     ==========================
"""


def test_a_refusal_says_how_much_of_how_much_and_what_is_largest():
    found = hlo.refusal(MESSAGE)
    assert (found.used, found.limit) == (20 * 2**30, 15.75 * 2**30)
    assert found.buffers == [
        {
            "operation": "Net.conv/aten__convolution",
            "shape": "f32[2048,16,256,256]{0,1,3,2:T(8,128)}",
            "bytes": 8 * 2**30,
            "unpadded_bytes": 1.5 * 2**30,
        },
        {"operation": "", "shape": "f32[16]{0:T(128)}", "bytes": 174592, "unpadded_bytes": 64},
    ]


@pytest.mark.parametrize(
    "message", ["INVALID_ARGUMENT: Used 1G of 2G hbm", "RESOURCE_EXHAUSTED: too many threads", ""]
)
def test_other_errors_are_no_refusal(message):
    assert hlo.refusal(message) is None
