"""The most expensive operations of a program; the same operation of equal layers counts as one.

Without that, a model of many layers that is one program would fill the list with one operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kp_dynamo.aot.cost import OpCost
from kp_dynamo.aot.program_report import FusionReport, Origin
from kp_dynamo.graph.module_paths import module_of, of_any_layer
from kp_dynamo.lowering.export import node_of
from kp_dynamo.lowering.fake_run import ExportedProgram

NUM_DEAREST = 12
_MAX_ORIGINS = 8


class Origins:
    """Where the operations of a program come from."""

    def __init__(self, program: ExportedProgram) -> None:
        self._origins = program.origins
        self._modules = {node.name: module_of(node) for node in program.gm.graph.nodes}

    def of(self, op: OpCost) -> tuple[Origin, ...]:
        """The first origins of an operation."""
        names = dict.fromkeys(map(node_of, op.op_names))
        known = (name for name in names if name in self._origins)
        found = dict.fromkeys(Origin(*self._origins[name], self._modules.get(name, "")) for name in known)
        return tuple(found)[:_MAX_ORIGINS]


def dearest_fusions(ops: Iterable[OpCost], origins: Origins) -> tuple[FusionReport, ...]:
    """The operations that take the most time, the first one first."""
    alike: defaultdict[object, list[OpCost]] = defaultdict(list)
    for op in ops:
        if op.total_seconds > 0:
            known = _of_any_layer(origins.of(op))
            alike[(op.kind, known) if known else op.name].append(op)
    groups = sorted(alike.values(), key=lambda group: -sum(op.total_seconds for op in group))
    return tuple(_fusion(group, origins) for group in groups[:NUM_DEAREST])


def _fusion(group: Sequence[OpCost], origins: Origins) -> FusionReport:
    first = max(group, key=lambda op: op.total_seconds)
    cycles = [op.cycles * op.times for op in group if op.cycles is not None]
    found = origins.of(first)
    return FusionReport(
        name=first.name,
        kind=first.kind,
        times=sum(op.times for op in group),
        cycles=sum(cycles) if len(cycles) == len(group) else None,
        modelled_ms=sum(op.total_seconds for op in group) * 1e3,
        hbm_bytes=sum(op.hbm_bytes * op.times for op in group),
        origins=_of_any_layer(found) if len(group) > 1 else found,
        num_alike=len(group),
    )


def _of_any_layer(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """The origins with "*" for the numbers of layers: "layers.*.attn (Attention)"."""
    return tuple(dict.fromkeys(replace(origin, module=of_any_layer(origin.module)) for origin in origins))
