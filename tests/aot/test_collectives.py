"""Collectives in scheduled HLO: their kind, bytes, axis and exposed time.

The texts are shortened from programs that libtpu 0.0.21 compiled for v5e 2x2: an MLP with "fsdp".
"""

from __future__ import annotations

import pytest

from kp_dynamo.aot.collectives import CollectiveReader
from kp_dynamo.aot.cost import cost_of
from kp_dynamo.aot.hlo import Module
from kp_dynamo.aot.links import Links
from kp_dynamo.aot.slice_report import CollectiveReport, added_up, collective_reports
from kp_dynamo.aot.timeline import Timeline
from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.hardware import CHIPS
from kp_dynamo.sharding.mesh import NamedMesh

MIB = 2**20
LINKS = Links(topology_of("v5e", 4))  # 2x2
GATHER_2_MIB = 2 * MIB * 3 / 4 / 1e11
SCATTER_4_MIB = 4 * MIB * 3 / 4 / 1e11

SYNCHRONOUS = """
ENTRY %main (w: bf16[2048,128]) -> bf16[2048,512] {
  %w = bf16[2048,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.18 = bf16[2048,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%w), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={1}, use_global_device_ids=true
}
"""  # noqa: E501

# Matmuls of 150 us (at 1.5 GHz), fusions of the chain of channel 4.
CHAIN = """
%start_body (param_0.32: bf16[512,512]) -> (bf16[512,512], u32[]) {
  %param_0.32 = bf16[512,512]{1,0} parameter(0)
  %all-gather.13 = bf16[512,2048]{1,0} all-gather(%param_0.32), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.1 = (bf16[512,512]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.13), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.12 (param_0.35: bf16[512,512], x: bf16[2048,512], y: bf16[512,512]) -> (bf16[2048,512], bf16[512,512], bf16[512,2048]) {
  %param_0.35 = bf16[512,512]{1,0} parameter(0)
  %x = bf16[2048,512]{1,0} parameter(1)
  %y = bf16[512,512]{1,0} parameter(2)
  %all-gather.15 = bf16[512,2048]{1,0} all-gather(%param_0.35), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"15"}}
  %convolution.1 = bf16[2048,512]{1,0} convolution(%x, %y), dim_labels=bf_io->bf
  ROOT %tuple.8 = (bf16[2048,512]{1,0}, bf16[512,512]{1,0}, bf16[512,2048]{1,0}) tuple(%convolution.1, %param_0.35, %all-gather.15)
}

%done_body (param_0.37: bf16[512,512]) -> bf16[512,2048] {
  %param_0.37 = bf16[512,512]{1,0} parameter(0)
  %all-gather.17 = bf16[512,2048]{1,0} all-gather(%param_0.37), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={1}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"15"}}
  ROOT %custom-call.3 = bf16[512,2048]{1,0} custom-call(%param_0.37, %all-gather.17), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: bf16[512,512], x: bf16[2048,512], y: bf16[512,512]) -> bf16[512,2048] {
  %w = bf16[512,512]{1,0} parameter(0)
  %x = bf16[2048,512]{1,0} parameter(1)
  %y = bf16[512,512]{1,0} parameter(2)
  %async-collective-start = (bf16[512,512]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%start_body
  %fusion.12 = (bf16[2048,512]{1,0}, bf16[512,512]{1,0}, bf16[512,2048]{1,0}) fusion(%w, %x, %y), kind=kOutput, calls=%async_collective_fusion.12, backend_config={"window_config":{"estimated_cycles":"CYCLES"}}
  ROOT %async-collective-done = bf16[512,2048]{1,0} fusion(%w), kind=kCustom, calls=%done_body
}
"""  # noqa: E501

SCATTER = """
%all-reduce-scatter (input: f32[2048,512]) -> f32[512,512] {
  %input = f32[2048,512]{1,0:T(8,128)} parameter(0)
  %all-reduce.8 = f32[2048,512]{1,0:T(8,128)} all-reduce(%input), channel_id=13, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add.1.clone
  %constant.83 = s32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.4 = f32[512,512]{1,0:T(8,128)} dynamic-slice(%all-reduce.8, %constant.83, %constant.83), dynamic_slice_sizes={512,512}
}

ENTRY %main (g: f32[2048,512]) -> f32[512,512] {
  %g = f32[2048,512]{1,0:T(8,128)} parameter(0)
  ROOT %fusion = f32[512,512]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501

PERMUTES_IN_A_LOOP = """
%body (p: (f32[1024,256])) -> (f32[1024,256]) {
  %p = (f32[1024,256]{1,0}) parameter(0)
  %x = f32[1024,256]{1,0} get-tuple-element(%p), index=0
  %collective-permute-start = (f32[1024,256]{1,0}, f32[1024,256]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %collective-permute-done = f32[1024,256]{1,0} collective-permute-done(%collective-permute-start)
  ROOT %t = (f32[1024,256]{1,0}) tuple(%collective-permute-done)
}

ENTRY %main (p: f32[1024,256]) -> (f32[1024,256]) {
  %a = f32[1024,256]{1,0} parameter(0)
  %t.1 = (f32[1024,256]{1,0}) tuple(%a)
  ROOT %while.1 = (f32[1024,256]{1,0}) while(%t.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501

SEVERAL_OPERANDS = """
ENTRY %main (a: f32[512], b: f32[2048]) -> (f32[512], f32[2048]) {
  %a = f32[512]{0:T(512)} parameter(0)
  %b = f32[2048]{0:T(1024)} parameter(1)
  ROOT %all-reduce.10 = (f32[512]{0:T(512)}, f32[2048]{0:T(1024)}) all-reduce(%a, %b), channel_id=5, replica_groups=[2,2]<=[4], use_global_device_ids=true, to_apply=%add
}
"""  # noqa: E501


def rows(text: str, mesh: str = "data=4") -> tuple[CollectiveReport, ...]:
    module = Module(text)
    seconds = {op.name: op.seconds for op in cost_of(module, CHIPS["v5e"]).ops}
    return collective_reports(Timeline(module, seconds, LINKS).collectives(), NamedMesh.parse(mesh))


def test_nothing_overlaps_with_a_single_instruction():
    [row] = rows(SYNCHRONOUS)
    assert (row.kind, row.axes, row.count, row.num_bytes) == ("all-gather", "data", 1, 2 * MIB)
    assert row.link_ms == row.exposed_ms == pytest.approx(GATHER_2_MIB * 1e3)


@pytest.mark.parametrize(("cycles", "exposed_s"), [(150_000, 0.0), (15_000, GATHER_2_MIB - 1e-5)])
def test_the_fusions_of_a_chain_are_one_collective_that_overlaps_with_their_compute(cycles, exposed_s):
    [row] = rows(CHAIN.replace("CYCLES", str(cycles)))
    assert (row.kind, row.count, row.num_bytes) == ("all-gather", 1, 2 * MIB)
    assert row.link_ms == pytest.approx(GATHER_2_MIB * 1e3)
    assert row.exposed_ms == pytest.approx(exposed_s * 1e3)


def test_only_the_matmul_of_a_chain_takes_time_on_the_chip():
    cost = cost_of(Module(CHAIN.replace("CYCLES", "150000")), CHIPS["v5e"])
    assert {op.name: op.kind for op in cost.ops} == {
        "async-collective-start": "collective", "fusion.12": "matmul", "async-collective-done": "collective",
    }  # fmt: skip
    assert cost.modelled_s == pytest.approx(1e-4)
    assert cost.unknown == ()


def test_the_buffers_of_a_collective_count_where_it_starts():
    """The fusion in between reads [2048, 512] and [512, 512], writes [2048, 512], and passes the rest on."""
    cost = cost_of(Module(CHAIN.replace("CYCLES", "150000")), CHIPS["v5e"])
    moved = {op.name: op.hbm_bytes for op in cost.ops}
    assert moved["fusion.12"] == (2048 + 512 + 2048) * 512 * 2
    assert moved["async-collective-start"] >= 512 * 512 * 2
    assert moved["async-collective-done"] == 0


def test_an_all_reduce_of_which_each_chip_keeps_a_slice_is_a_reduce_scatter():
    [row] = rows(SCATTER)
    assert (row.kind, row.num_bytes) == ("reduce-scatter", 4 * MIB)
    assert row.exposed_ms == row.link_ms == pytest.approx(SCATTER_4_MIB * 1e3)


def test_what_a_loop_repeats_counts_each_time():
    [row] = rows(PERMUTES_IN_A_LOOP)
    assert (row.kind, row.count, row.num_bytes) == ("collective-permute", 3, 3 * MIB)
    assert row.link_ms == row.exposed_ms == pytest.approx(3e3 * MIB / 5e10)


def test_all_operands_count():
    [row] = rows(SEVERAL_OPERANDS, "data=2,model=2")
    assert (row.kind, row.axes, row.num_bytes) == ("all-reduce", "model", 2560 * 4)
    assert row.link_ms == pytest.approx(2e-3)  # a reduce-scatter and an all-gather of one hop


@pytest.mark.parametrize(
    ("attribute", "groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3)), "model"),
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3)), "data"),
        ("replica_groups={}", ((0, 1, 2, 3),), "data+model"),
        ("replica_groups=[1,4]<=[4]", ((0, 1, 2, 3),), "data+model"),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3)), "model"),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3)), "data"),
        ("replica_groups={{0},{1},{2},{3}}", ((0,), (1,), (2,), (3,)), "none"),
    ],
)
def test_the_groups_say_the_axis(attribute, groups, axes):
    module = Module(SEVERAL_OPERANDS.replace("replica_groups=[2,2]<=[4]", attribute))
    body = module.computations[module.entry]
    part = CollectiveReader(module, 4).read(body[-1], body)
    assert part.collective.groups == groups
    assert part.collective.axes(NamedMesh.of({"data": 2, "model": 2})) == axes


def test_a_mesh_may_number_its_chips_in_another_order():
    [found] = Timeline(Module(SEVERAL_OPERANDS), {}, LINKS).collectives()
    mesh = NamedMesh(("data", "model"), (2, 2), device_ids=(0, 2, 1, 3))
    assert found.collective.groups == ((0, 1), (2, 3))
    assert found.collective.axes(mesh) == "data"


def test_the_programs_of_a_step_are_added_up():
    once = rows(SCATTER)
    [row] = added_up([(2, once), (3, once)])
    assert (row.count, row.num_bytes) == (5, 20 * MIB)
    assert row.link_ms == pytest.approx(5 * once[0].link_ms)
