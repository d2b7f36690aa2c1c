"""Builds the report of a compiled program."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kp_dynamo.aot.alike_fusions import Origins, dearest_fusions
from kp_dynamo.aot.compiler import Compiled
from kp_dynamo.aot.cost import OpCost, ProgramCost, cost_of
from kp_dynamo.aot.hlo import Module
from kp_dynamo.aot.links import Links
from kp_dynamo.aot.module_times import module_times
from kp_dynamo.aot.program_report import CustomCallReport, ProgramReport
from kp_dynamo.aot.slice_report import CollectiveReport, collective_reports
from kp_dynamo.aot.slices import Slice
from kp_dynamo.aot.timeline import Timeline
from kp_dynamo.explanation.graph_reports import PieceReport
from kp_dynamo.graph.flops import model_flops, recomputed_flops
from kp_dynamo.hardware import Chip
from kp_dynamo.lowering.fake_run import ExportedProgram


@dataclass(frozen=True)
class Target:
    """What a program is compiled for: one device, or all of a slice.

    Attributes:
        chip: The figures of one device.
        slice: The slice, or None.
    """

    chip: Chip
    slice: Slice | None = None


def program_report(
    name: str, program: ExportedProgram, made: Compiled, target: Target, piece: PieceReport | None = None
) -> ProgramReport:
    """The figures of a program that the TPU compiler compiled; `piece` is that of a divided graph that it computes."""
    module, chip = Module(made.hlo), target.chip
    cost = cost_of(module, chip)
    num_devices = 1 if target.slice is None else target.slice.topology.num_devices
    by_kind: defaultdict[str, float] = defaultdict(float)
    for op in cost.ops:
        by_kind[op.kind] += op.total_seconds * 1e3
    origins = Origins(program)
    return ProgramReport(
        name=name,
        runs=max(1, program.num_runs),  # a submitted program runs at least once
        compile_s=made.seconds,
        argument_bytes=made.argument_bytes,
        output_bytes=made.output_bytes,
        temp_bytes=made.temp_bytes,
        alias_bytes=made.alias_bytes,
        generated_code_bytes=made.generated_code_bytes,
        live_bytes=made.live_bytes,
        flops=made.flops,
        bytes=made.bytes,
        hbm_bytes=cost.hbm_bytes,
        model_flops=model_flops(program.gm.graph) // num_devices,
        cycles=cost.cycles,
        estimated_ms=cost.cycles / chip.clock_hz * 1e3,
        modelled_ms=cost.modelled_s * 1e3,
        unknown=cost.unknown,
        ms_by_kind=dict(by_kind),
        dearest=dearest_fusions(cost.ops, origins),
        num_copies=sum(op.times for op in cost.ops if op.kind == "copy" and op.seconds > 0),
        held_bytes=program.held_bytes,
        custom_calls=tuple(_custom_call(op, origins) for op in cost.ops if op.is_opaque),
        modules=piece.modules if piece else (),
        layers=piece.layers if piece else 1,
        collectives=() if target.slice is None else _collectives(module, cost, target.slice),
        by_module=module_times(program.gm.graph, cost, chip, num_devices),
        recomputed_flops=recomputed_flops(program.gm.graph) // num_devices,
    )


def _collectives(module: Module, cost: ProgramCost, found: Slice) -> tuple[CollectiveReport, ...]:
    compute_s = {op.name: op.seconds for op in cost.ops}
    return collective_reports(Timeline(module, compute_s, Links(found.topology)).collectives(), found.mesh)


def _custom_call(op: OpCost, origins: Origins) -> CustomCallReport:
    return CustomCallReport(
        name=op.name,
        times=op.times,
        flops=None if op.flops is None else op.flops * op.times,
        hbm_bytes=op.hbm_bytes * op.times,
        roofline_ms=op.total_seconds * 1e3,
        origins=origins.of(op),
    )
