"""Collectives that the SparseCores of a v7 run beside its computing cores.

The text is shortened from a program that libtpu 0.0.51 compiled for tpu7x 2x2x1: an MLP with "fsdp".
"""

from __future__ import annotations

import pytest

from kp_dynamo.aot.cost import ProgramCost, cost_of
from kp_dynamo.aot.hlo import Module
from kp_dynamo.aot.links import Links
from kp_dynamo.aot.slice_report import CollectiveReport, collective_reports
from kp_dynamo.aot.timeline import Timeline
from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.hardware import DEVICES
from kp_dynamo.sharding.mesh import NamedMesh

MIB = 2**20
GATHER_S = 32 * MIB * 3 / 4 / 2e11  # 2 links of a chip, which three of four parts enter
SCATTER_S = 64 * MIB * 3 / 4 / 2e11

PROGRAM = """
%called_computation.4 (param_0.18: bf16[256,8192]) -> bf16[2048,8192] {
  %param_0.18 = bf16[256,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %tuple.10 = (bf16[256,8192]{1,0:T(8,128)(2,1)}) tuple(%param_0.18)
  %get-tuple-element.6 = bf16[256,8192]{1,0:T(8,128)(2,1)} get-tuple-element(%tuple.10), index=0
  ROOT %all-gather.11 = bf16[2048,8192]{1,0:T(8,128)(2,1)} all-gather(%get-tuple-element.6), channel_id=2, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, use_global_device_ids=true
}, execution_thread="sparsecore"

%async_computation.1 (param_0.12: bf16[256,8192]) -> bf16[2048,8192] {
  %param_0.12 = bf16[256,8192]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %custom-call.1 = bf16[2048,8192]{1,0:T(8,128)(2,1)} custom-call(%param_0.12), custom_call_target="TODO(b/522284627)", called_computations={%called_computation.4}
}, execution_thread="sparsecore"

%called_computation.5 (param_0.19: f32[8192,2048]) -> f32[8192,256] {
  %param_0.19 = f32[8192,2048]{1,0:T(8,128)} parameter(0)
  ROOT %reduce-scatter.5 = f32[8192,256]{1,0:T(8,128)} reduce-scatter(%param_0.19), channel_id=6, replica_groups=mesh['axis_0'=8] {'axis_0'}, use_global_device_ids=true, dimensions={1}, to_apply=%add.1
}, execution_thread="sparsecore"

%async_computation.3 (param_0.16: f32[8192,2048]) -> f32[8192,256] {
  %param_0.16 = f32[8192,2048]{1,0:T(8,128)} parameter(0)
  ROOT %custom-call.2 = f32[8192,256]{1,0:T(8,128)} custom-call(%param_0.16), custom_call_target="TODO(b/522284627)", called_computations={%called_computation.5}
}, execution_thread="sparsecore"

%relayout (param_0.1: bf16[512,512]) -> bf16[512,512] {
  %param_0.1 = bf16[512,512]{1,0} parameter(0)
  ROOT %copy.1 = bf16[512,512]{0,1} copy(%param_0.1)
}, execution_thread="sparsecore"

%fused_computation (param_0.3: bf16[512,8192], param_1.2: bf16[512,2048]) -> f32[8192,2048] {
  %param_0.3 = bf16[512,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.2 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %convolution.5 = f32[8192,2048]{1,0:T(8,128)} convolution(%param_0.3, %param_1.2), dim_labels=fb_io->bf
}

ENTRY %main.1_spmd (param: bf16[512,2048], param.1: bf16[256,8192], h: bf16[512,8192], t: bf16[512,512]) -> (f32[8192,256], bf16[2048,8192], bf16[512,512]) {
  %param = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param.1 = bf16[256,8192]{1,0:T(8,128)(2,1)} parameter(1)
  %h = bf16[512,8192]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %t = bf16[512,512]{1,0} parameter(3)
  %copy.call-start = ((bf16[512,512]{1,0}), bf16[512,512]{0,1}, s32[1]{0}) async-start(%t), async_execution_thread="sparsecore", calls=%relayout
  %all-gather.7.call-start = ((), (), (s32[8192]{0:T(1024)}, s32[69]{0:T(1)S(11)})) async-start(), async_execution_thread="sparsecore", calls=%async_computation.1
  %all-gather.7.call-update = ((bf16[256,8192]{1,0:T(8,128)(2,1)}), bf16[2048,8192]{1,0:T(8,128)(2,1)}, (s32[8192]{0:T(1024)}, s32[69]{0:T(1)S(11)})) async-update(%all-gather.7.call-start, %param.1), output_to_operand_aliasing={{2,0}: (0, {2,0})}
  %reduce-scatter.4.call-start = ((), (), (s32[12591104]{0:T(1024)}, s32[161]{0:T(1)S(11)})) async-start(), async_execution_thread="sparsecore", calls=%async_computation.3
  %fusion.1 = f32[8192,2048]{1,0:T(8,128)} fusion(%h, %param), kind=kOutput, calls=%fused_computation, backend_config={"window_config":{"estimated_cycles":"220000"}}
  %reduce-scatter.4.call-update = ((f32[8192,2048]{1,0:T(8,128)}), f32[8192,256]{1,0:T(8,128)}, (s32[12591104]{0:T(1024)}, s32[161]{0:T(1)S(11)})) async-update(%reduce-scatter.4.call-start, %fusion.1)
  %all-gather.7.call-done = bf16[2048,8192]{1,0:T(8,128)(2,1)} async-done(%all-gather.7.call-update)
  %reduce-scatter.4.call-done = f32[8192,256]{1,0:T(8,128)} async-done(%reduce-scatter.4.call-update)
  %copy.call-done = bf16[512,512]{0,1} async-done(%copy.call-start)
  ROOT %tuple.2 = (f32[8192,256]{1,0:T(8,128)}, bf16[2048,8192]{1,0:T(8,128)(2,1)}, bf16[512,512]{0,1}) tuple(%reduce-scatter.4.call-done, %all-gather.7.call-done, %copy.call-done)
}
"""  # noqa: E501


def cost(text: str) -> ProgramCost:
    return cost_of(Module(text), DEVICES["v7"])


def rows(text: str) -> tuple[CollectiveReport, ...]:
    seconds = {op.name: op.seconds for op in cost(text).ops}
    timeline = Timeline(Module(text), seconds, Links(topology_of("v7", 4)))
    return collective_reports(timeline.collectives(), NamedMesh.parse("data=8"))


def test_a_collective_begins_with_its_operands_and_ends_where_the_core_waits():
    scatter, gather = rows(PROGRAM)
    assert (gather.kind, gather.axes, gather.count, gather.num_bytes) == ("all-gather", "data", 1, 32 * MIB)
    assert (scatter.kind, scatter.axes, scatter.count, scatter.num_bytes) == ("reduce-scatter", "data", 1, 64 * MIB)
    assert gather.link_ms == pytest.approx(GATHER_S * 1e3)
    assert scatter.link_ms == pytest.approx(SCATTER_S * 1e3)
    # The matmul takes 100 us at 2.2 GHz. The gather goes on meanwhile; the scatter waits for its result.
    assert gather.exposed_ms == pytest.approx((GATHER_S - 1e-4) * 1e3)
    assert scatter.exposed_ms == pytest.approx(SCATTER_S * 1e3)


def test_a_start_with_operands_begins_at_once():
    text = PROGRAM.replace(
        'async-start(), async_execution_thread="sparsecore", calls=%async_computation.1',
        'async-start(%param.1), async_execution_thread="sparsecore", calls=%async_computation.1',
    )
    text = text.replace("(%all-gather.7.call-start, %param.1)", "(%all-gather.7.call-start)")
    assert rows(text) == rows(PROGRAM)


def test_the_core_has_no_work_with_it_and_its_buffers_count_once():
    found = {op.name: op for op in cost(PROGRAM).ops}
    parts = [op for name, op in found.items() if "all-gather" in name or "reduce-scatter" in name]
    assert {op.kind for op in parts} == {"collective"}
    assert sum(op.seconds for op in parts) == 0
    assert sum(op.hbm_bytes for op in parts) == (32 + 4 + 64 + 8) * MIB
    assert cost(PROGRAM).unknown == ()


def test_what_else_the_sparse_cores_do_is_a_copy():
    found = {op.name: op for op in cost(PROGRAM).ops}
    assert found["copy.call-done"].kind == "copy"
    assert found["copy.call-done"].hbm_bytes == 512 * 512 * 2
