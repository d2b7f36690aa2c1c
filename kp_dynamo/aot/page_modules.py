"""Time by module and what limits the step, for its page."""

from __future__ import annotations

from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.aot.module_times import of_all_layers
from kp_dynamo.hardware import DEVICES
from kp_dynamo.page.content import Section, Tree
from kp_dynamo.page.limits import ModuleRow, limits_sentence
from kp_dynamo.page.module_tree import CAPTION, HEAD, module_branches


def modules_section(report: AotFigures) -> Section:
    """Time by module; nothing for a report that has none."""
    rows = _module_rows(report)
    if not rows:
        return Section("modules", "Time by module", ())
    model = next((row.kind for row in rows if row.kind and not row.path), "the model")
    outside = {
        "outside of submodules": [row for row in rows if not row.path and not row.kind],
        "waiting for other chips": [_waiting(report)],
    }
    branches = module_branches((row for row in rows if row.path or row.kind), model, outside)
    return Section("modules", "Time by module", (Tree(HEAD, branches, caption=CAPTION),) if branches else ())


def what_limits(report: AotFigures) -> str:
    """What limits the step, in a sentence: by module, or by program for a report of an earlier version."""
    if rows := _module_rows(report):
        return limits_sentence([*rows, _waiting(report)])
    bandwidth = DEVICES[report.target].hbm_bytes_per_s
    programs = [
        ModuleRow(p.name, "", *(p.runs * ms for ms in (p.modelled_ms, p.flops_floor_ms(report.target), memory_ms)))
        for p in report.programs
        for memory_ms in (p.hbm_bytes / bandwidth * 1e3,)
    ]
    return limits_sentence([*programs, _waiting(report)], "programs")


def _module_rows(report: AotFigures) -> list[ModuleRow]:
    """The time of each module in all runs of a step."""
    return [
        ModuleRow(row.path, row.kind, *(n * ms for ms in (row.modelled_ms, row.flops_floor_ms, row.hbm_floor_ms)))
        for p in report.programs
        for row, n in of_all_layers(p.by_module, p.modules, p.runs, p.layers)
    ]


def _waiting(report: AotFigures) -> ModuleRow:
    return ModuleRow("", "", report.exposed_ms, links_ms=report.exposed_ms)
