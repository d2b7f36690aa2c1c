"""Reading scheduled HLO, on lines as libtpu 0.0.21 prints them."""

from __future__ import annotations

import pytest

from kp_dynamo.aot.cost import cost_of
from kp_dynamo.aot.hlo import Module, Shape
from kp_dynamo.hardware import CHIPS

V5E = CHIPS["v5e"]

PROGRAM = """
HloModule IrToHlo.9, is_scheduled=true

%fused (p.1: bf16[512,256], p.2: bf16[256,128]) -> f32[512,128] {
  %p.1 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %convolution.1 = f32[512,128]{1,0:T(8,128)} convolution(%p.1, %p.2), dim_labels=bf_io->bf, metadata={op_name="mm_1|aten__mm"}
}

%looped (q: f32[512,128]) -> f32[512,128] {
  %q = f32[512,128]{1,0:T(8,128)} parameter(0)
  ROOT %exponential.1 = f32[512,128]{1,0:T(8,128)} exponential(%q), metadata={op_name="exp_1|aten__exp"}
}

%body (s: (s32[], f32[512,128])) -> (s32[], f32[512,128]) {
  %s = (s32[]{:T(128)}, f32[512,128]{1,0:T(8,128)}) parameter(0)
  %get-tuple-element.1 = f32[512,128]{1,0:T(8,128)} get-tuple-element(%s), index=1
  %fusion.2 = f32[512,128]{1,0:T(8,128)} fusion(%get-tuple-element.1), kind=kLoop, calls=%looped, backend_config={"estimated_cycles":"100"}
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[512,128]{1,0:T(8,128)}) tuple(%fusion.2)
}

ENTRY %main.9 (a: bf16[512,256], b: bf16[256,128]) -> f32[512,128] {
  %a = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion.1 = f32[512,128]{1,0:T(8,128)} fusion(%a, %copy-done), kind=kOutput, calls=%fused, metadata={op_name="mm_1|aten__mm"}, backend_config={"estimated_cycles":"1500"}
  %while.1 = (s32[]{:T(128)}, f32[512,128]{1,0:T(8,128)}) while(%fusion.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %custom-call.1 = f32[512,128]{1,0:T(8,128)} custom-call(%while.1), custom_call_target="tpu_custom_call"
  ROOT %copy.1 = f32[512,128]{1,0:T(8,128)} copy(%custom-call.1), backend_config={"estimated_cycles":"700"}
}
"""  # noqa: E501


def test_a_shape_counts_bytes_by_memory():
    assert Shape.read("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == Shape(0, 2048, (8, 128))
    assert Shape.read("(f32[4]{0:T(128)}, pred[3]{0}, f8e4m3fn[5]{0}, c64[])") == Shape(16 + 3 + 5 + 8, 0, (4,))


def test_instructions_know_their_operands_and_attributes():
    module = Module(PROGRAM)
    assert module.entry == "main.9"
    by_name = {i.name: i for i in module.computations["main.9"]}
    fusion = by_name["fusion.1"]
    assert (fusion.opcode, fusion.operands, fusion.cycles) == ("fusion", ("a", "copy-done"), 1500)
    assert (fusion.called("calls"), fusion.attribute("kind"), fusion.op_name) == ("fused", "kOutput", "mm_1|aten__mm")
    assert by_name["while.1"].trips == 3
    assert module.has_matmul(fusion)
    assert not module.has_matmul(by_name["copy.1"])


@pytest.mark.parametrize("number", [2**64 - 1, 2**63 - 1])
def test_a_broken_estimate_is_none(number):
    """libtpu writes -1 cycles as a number of 64 bits."""
    broken = PROGRAM.replace('"estimated_cycles":"700"', f'"estimated_cycles":"{number}"')
    copied = next(i for i in Module(broken).computations["main.9"] if i.name == "copy.1")
    assert copied.cycles is None


def test_cycles_count_loop_bodies_by_their_trips():
    cost = cost_of(Module(PROGRAM), V5E)
    assert cost.cycles == 1500 + 3 * 100 + 700
    assert [op.times for op in cost.ops if op.name == "fusion.2"] == [3]


def test_what_has_no_estimate_is_listed_and_never_silently_zero():
    assert cost_of(Module(PROGRAM), V5E).unknown == ("custom-call.1",)


def test_the_model_uses_cycles_for_matmuls_and_bytes_otherwise():
    cost = cost_of(Module(PROGRAM), V5E)
    seconds = {op.name: op.seconds for op in cost.ops}
    result = 512 * 128 * 4
    assert seconds["fusion.1"] == 1500 / V5E.clock_hz
    assert seconds["fusion.2"] == 2 * result / V5E.hbm_bytes_per_s
    assert seconds["copy-done"] == 0  # it overlaps; its traffic counts in the whole
    assert [op.hbm_bytes for op in cost.ops if op.name == "copy-done"] == [256 * 128 * 2]
    traffic = sum(op.hbm_bytes * op.times for op in cost.ops) / V5E.hbm_bytes_per_s
    assert cost.modelled_s == max(sum(op.total_seconds for op in cost.ops), traffic)


@pytest.mark.parametrize("before", ["", '"bytes_accessed":"4096",'])  # libtpu 0.0.21, and 0.0.51
def test_a_custom_call_takes_its_roofline(before):
    by_bytes = (2 * 512 * 128 * 4 + 4) / V5E.hbm_bytes_per_s  # the loop counts in an integer
    (silent,) = (op for op in cost_of(Module(PROGRAM), V5E).ops if op.is_opaque)
    assert (silent.flops, silent.seconds) == (None, by_bytes)
    for flops, seconds in ((1, by_bytes), (10**12, 10**12 / V5E.bf16_flops)):
        declared = (
            '"tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":'
            f'{{{before}"flops":"{flops}"}}}}}}'
        )
        cost = cost_of(Module(PROGRAM.replace('"tpu_custom_call"', declared)), V5E)
        (call,) = (op for op in cost.ops if op.is_opaque)
        assert (call.flops, call.seconds) == (flops, seconds)
        assert cost.cycles == 1500 + 3 * 100 + 700  # as without it


def test_kinds_tell_where_the_time_goes():
    kinds = {op.name: op.kind for op in cost_of(Module(PROGRAM), V5E).ops}
    assert kinds["fusion.1"] == "matmul"
    assert kinds["fusion.2"] == "elementwise and reduce"
    assert (kinds["copy.1"], kinds["custom-call.1"]) == ("copy", "custom call")


def test_an_unknown_trip_count_is_one_and_is_listed():
    text = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    cost = cost_of(Module(text), V5E)
    assert cost.cycles == 1500 + 100 + 700
    assert cost.unknown == ("while.1", "custom-call.1")


SLICED = """
HloModule IrToHlo.9, is_scheduled=true

%updating (p.1: f32[64,1024], p.2: f32[8,1024], p.3: s32[]) -> f32[64,1024] {
  %p.1 = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %p.2 = f32[8,1024]{1,0:T(8,128)} parameter(1)
  %p.3 = s32[]{:T(128)} parameter(2)
  %negate.1 = f32[8,1024]{1,0:T(8,128)} negate(%p.2)
  ROOT %dynamic-update-slice.1 = f32[64,1024]{1,0:T(8,128)} dynamic-update-slice(%p.1, %negate.1, %p.3, %p.3)
}

%inner (r.1: f32[64,1024], r.2: s32[]) -> f32[8,1024] {
  %r.1 = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %r.2 = s32[]{:T(128)} parameter(1)
  ROOT %dynamic-slice.1 = f32[8,1024]{1,0:T(8,128)} dynamic-slice(%r.1, %r.2, %r.2), dynamic_slice_sizes={8,1024}
}

%slicing (q.1: f32[64,1024], q.2: s32[]) -> f32[8,1024] {
  %q.1 = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %q.2 = s32[]{:T(128)} parameter(1)
  %bitcast.1 = f32[64,1024]{1,0:T(8,128)} bitcast(%q.1)
  %fusion.9 = f32[8,1024]{1,0:T(8,128)} fusion(%bitcast.1, %q.2), kind=kLoop, calls=%inner
  ROOT %exponential.1 = f32[8,1024]{1,0:T(8,128)} exponential(%fusion.9)
}

%both (t.1: f32[64,1024], t.2: s32[]) -> f32[64,1024] {
  %t.1 = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %t.2 = s32[]{:T(128)} parameter(1)
  %dynamic-slice.2 = f32[8,1024]{1,0:T(8,128)} dynamic-slice(%t.1, %t.2, %t.2), dynamic_slice_sizes={8,1024}
  %dynamic-update-slice.2 = f32[64,1024]{1,0:T(8,128)} dynamic-update-slice(%t.1, %dynamic-slice.2, %t.2, %t.2)
  ROOT %negate.2 = f32[64,1024]{1,0:T(8,128)} negate(%dynamic-update-slice.2)
}

ENTRY %main.9 (a: f32[64,1024], b: f32[8,1024], c: s32[]) -> f32[64,1024] {
  %a = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %b = f32[8,1024]{1,0:T(8,128)S(1)} parameter(1)
  %c = s32[]{:T(128)} parameter(2)
  %update = f32[64,1024]{1,0:T(8,128)} fusion(%a, %b, %c), kind=kLoop, calls=%updating
  %slice = f32[8,1024]{1,0:T(8,128)} fusion(%update, %c), kind=kLoop, calls=%slicing
  %plain = f32[64,1024]{1,0:T(8,128)} dynamic-update-slice(%update, %slice, %c, %c)
  ROOT %whole = f32[64,1024]{1,0:T(8,128)} fusion(%plain, %c), kind=kLoop, calls=%both
}
"""


def test_slices_and_updates_in_place_count_what_they_move():
    """A part of 8 rows: an update writes it, a slice reads and writes it; an update that is no result moves all."""
    part, whole, index = 8 * 1024 * 4, 64 * 1024 * 4, 4
    moved = {op.name: op.hbm_bytes for op in cost_of(Module(SLICED), V5E).ops}
    assert moved["update"] == part + index
    assert moved["slice"] == 2 * part + index
    assert moved["plain"] == 2 * part + 2 * index
    assert moved["whole"] == 2 * whole + index


READ_THROUGH_A_BITCAST = """
HloModule IrToHlo.10, is_scheduled=true

%viewing (r.1: bf16[1,8,2048,64]) -> bf16[8,64,2048] {
  %r.1 = bf16[1,8,2048,64]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %bitcast.1 = bf16[8,64,2048]{2,1,0:T(8,128)(2,1)} bitcast(%r.1)
}

%reading (q.1: bf16[1,8,2048,64]) -> f32[8,64] {
  %q.1 = bf16[1,8,2048,64]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  %fusion.1 = bf16[8,64,2048]{2,1,0:T(8,128)(2,1)} fusion(%q.1), kind=kLoop, calls=%viewing
  ROOT %reduce.1 = f32[8,64]{1,0:T(8,128)S(1)} reduce(%fusion.1), dimensions={2}
}

ENTRY %main.10 (keys: bf16[1,8,2048,64]) -> f32[8,64] {
  %keys = bf16[1,8,2048,64]{2,3,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %sums = f32[8,64]{1,0:T(8,128)S(1)} fusion(%keys), kind=kLoop, calls=%reading
}
"""


def test_an_operand_that_is_read_through_a_fusion_of_a_bitcast_counts():
    """As the keys of a decoding step, of which the figures had no byte."""
    [sums] = cost_of(Module(READ_THROUGH_A_BITCAST), V5E).ops
    assert sums.hbm_bytes == 8 * 2048 * 64 * 2
