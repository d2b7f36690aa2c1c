"""The time of a program by the modules of the model.

A fusion computes operators of several modules. If it has matmuls, its time and bytes are those of their modules,
because they take most of it; otherwise all of its modules get equal parts. The matmuls are counted from the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import fx

from kp_dynamo.aot.cost import OpCost, ProgramCost
from kp_dynamo.aot.program_report import ModuleTime
from kp_dynamo.graph.flops import node_flops
from kp_dynamo.graph.module_paths import modules_of, paths_of_runs
from kp_dynamo.hardware import Chip
from kp_dynamo.lowering.export import node_of


def module_times(graph: fx.Graph, cost: ProgramCost, chip: Chip, num_devices: int) -> tuple[ModuleTime, ...]:
    """One row for each module, in the order of the graph; together they take the modelled time of the program."""
    stacks = {node.name: modules_of(node) or [("", "")] for node in graph.nodes}
    rows = dict.fromkeys(module for stack in stacks.values() for module in stack)
    work = {node.name: count for node in graph.nodes if (count := node_flops(node))}
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    num_bytes: defaultdict[tuple[str, str], float] = defaultdict(float)
    flops: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in cost.ops:
        for module, share in _shares(op, stacks, work):
            seconds[module] += share * op.total_seconds
            num_bytes[module] += share * op.hbm_bytes * op.times
    for name, count in work.items():
        flops[stacks[name][-1]] += count / num_devices
    # What the program takes beyond its operations: asynchronous copies that nothing overlaps.
    seconds["", ""] += max(0.0, cost.modelled_s - sum(op.total_seconds for op in cost.ops))
    by_flops, by_bytes = 1e3 / chip.bf16_flops, 1e3 / chip.hbm_bytes_per_s
    return tuple(
        ModuleTime(*module, seconds[module] * 1e3, flops[module] * by_flops, num_bytes[module] * by_bytes)
        for module in dict.fromkeys([*rows, ("", "")])
    )


def _shares(
    op: OpCost, stacks: Mapping[str, list[tuple[str, str]]], work: Mapping[str, int]
) -> Iterator[tuple[tuple[str, str], float]]:
    """The modules of an operation, and the part that each has in it."""
    names = [name for name in dict.fromkeys(map(node_of, op.op_names)) if name in stacks]
    weights: Mapping[str, float] = {name: work[name] for name in names if name in work}
    weights = weights or {name: 1.0 for name in names if stacks[name][-1] != ("", "")}
    whole = sum(weights.values())
    if not whole:
        yield ("", ""), 1.0
    for name, weight in weights.items():
        yield stacks[name][-1], weight / whole


def of_all_layers(
    rows: Iterable[ModuleTime], modules: tuple[str, ...], runs: int, layers: int = 1
) -> Iterator[tuple[ModuleTime, float]]:
    """The rows of all runs of a program, each with how often it counts.

    Args:
        rows: They have the paths of the first run.
        modules: The modules of all runs, as in the program's report.
        runs: How often a step runs it.
        layers: The number of equal layers in a run.
    """
    for row in rows:
        paths = paths_of_runs(row.path, modules, layers)
        if not paths:
            yield row, runs
        for path in paths:
            yield replace(row, path=path), runs / len(paths)
