"""Run the passes of a graph, with checks, timing and dumps."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import fx

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUOptimizationError, TPUOutOfMemoryError
from kp_dynamo.graph.edit_example import EditExamples
from kp_dynamo.graph.editing import check_values
from kp_dynamo.graph.least_memory import remedies
from kp_dynamo.graph.operand_dtypes import check_operand_dtypes
from kp_dynamo.graph.places import Place, place_of
from kp_dynamo.ledger import GraphLedger
from kp_dynamo.passes.base import GraphPass, PassReport
from kp_dynamo.passes.layout.strides import keep_strides, result_values
from kp_dynamo.passes.recompute.budget import BudgetError
from kp_dynamo.pipeline.build import OUR_PASSES, Pipeline
from kp_dynamo.pipeline.dumps import dump_graph, dump_reports
from kp_dynamo.pipeline.taken_back import copy_of, taken_back
from kp_dynamo.telemetry import log
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.stages import stage

_LESS_STATE = "optimizer_state_factor=1 or 0 if the optimizer keeps less state than AdamW's two moments"


def run_pipeline(
    gm: fx.GraphModule,
    pipeline: Pipeline,
    options: CompileOptions,
    graph_name: str,
    ledger: GraphLedger | None = None,
    *,
    with_examples: bool = False,
) -> list[PassReport]:
    """Run the passes on `gm` in place; lint, recompile, time, count, trace and dump around each.

    Args:
        gm: The graph.
        pipeline: The passes.
        options: The options.
        graph_name: Its name in logs, dumps and reports.
        ledger: Measures each pass; a pass that exceeds its bound does not run on `gm`. None measures nothing.
        with_examples: Whether each report of a pass that changed the graph has an example of it.

    Raises:
        XLACompilationError: The operands of a matmul have several dtypes, as `check_operand_dtypes` says.
        TPUOptimizationError: A pass raised or left an ill-formed graph, or it refused a match or exceeded its bound and
            `strict` is set. The message names the pass and those that ran before it.
        TPUOutOfMemoryError: `checkpoint="auto"` cannot fit the budget.
        TPUConfigurationError: `dump_dir` cannot be written.
    """
    check_operand_dtypes(gm.graph)
    reports: list[PassReport] = []
    start = time.perf_counter()
    dump_graph(gm, options, f"{graph_name}.0.captured")
    log.trace_graph(gm, f"{graph_name}.before_passes")
    seen = result_values(gm.graph)
    examples = EditExamples(gm.graph) if with_examples else None
    with stage(f"passes of {graph_name}"):
        for number, graph_pass in enumerate(pipeline, start=1):
            before = [r.name for r in reports]
            if ledger is None:
                report = _run_pass(gm, graph_pass, before)
            else:
                report = _run_measured(gm, graph_pass, before, ledger)
                if report.errors is not None and report.errors.is_taken_back:
                    report = taken_back(report, graph_name, strict=options.strict)
            if examples is not None and (report.rewritten or graph_pass.name not in OUR_PASSES):
                report = replace(report, example=examples.of_edit())
            reports.append(_with_places(report, gm.graph))
            dump_graph(gm, options, f"{graph_name}.{number}.{graph_pass.name}")
            TELEMETRY.passed(graph_name, reports[-1].to_dict())
        keep_strides(gm.graph, seen)
    TELEMETRY.spent("passes", time.perf_counter() - start)
    log.trace_graph(gm, f"{graph_name}.after_passes")
    dump_reports(reports, options, graph_name)
    if options.strict:
        _raise_on_refusal(reports)
    return reports


def _run_pass(gm: fx.GraphModule, graph_pass: GraphPass, before: list[str]) -> PassReport:
    signature = _signature(gm.graph)
    try:
        report = graph_pass(gm)
        if not isinstance(report, PassReport):
            raise TypeError(f"the pass returned {type(report).__name__}, expected a PassReport")
        is_ours = graph_pass.name in OUR_PASSES
        if report.rewritten or not is_ours:  # our passes report 0 only for an unchanged graph; a user's may be wrong
            _check_edited(gm.graph, signature)
            if not is_ours:
                check_values(gm.graph)
            gm.recompile()
    except BudgetError as cause:
        raise TPUOutOfMemoryError(f"checkpoint='auto': {cause}. {remedies('auto', _LESS_STATE)}") from None
    except Exception as cause:
        ran = f"after {', '.join(before)}" if before else "as the first pass"
        raise TPUOptimizationError(
            f"pass {graph_pass.name!r} failed, run {ran}: {type(cause).__name__}: {cause}. "
            f'Disable it with options={{"disable_passes": ["{graph_pass.name}"]}}.'
        ) from cause
    return report


def _run_measured(gm: fx.GraphModule, graph_pass: GraphPass, before: list[str], ledger: GraphLedger) -> PassReport:
    """Run a pass on a copy, and then on `gm` unless it exceeds its bound there.

    `gm` is then the graph without the pass, down to its nodes, to which others refer.
    """
    trial = copy_of(gm)
    report = _run_pass(trial, graph_pass, before)
    errors = ledger.measure(trial, bool(report.rewritten) or graph_pass.name not in OUR_PASSES)
    if errors.is_taken_back:
        return replace(report, errors=errors)
    return replace(_run_pass(gm, graph_pass, before), errors=errors)


def _with_places(report: PassReport, graph: fx.Graph) -> PassReport:
    """The report with the places of its refused nodes, looked up before a later pass replaces them."""
    if not report.refused:
        return report
    nodes = {node.name: node for node in graph.nodes}
    places = (place_of(nodes[name]) if name in nodes else Place("") for name, _ in report.refused)
    return replace(report, places=tuple(places))


def _check_edited(graph: fx.Graph, signature: tuple[list[str], int]) -> None:
    graph.lint()
    if _signature(graph) != signature:
        raise ValueError("the pass changed the inputs of the graph or the number of its results")


def _signature(graph: fx.Graph) -> tuple[list[str], int]:
    """The names of the inputs and the number of results."""
    results = graph.output_node().args[0]
    inputs = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    return inputs, len(results) if isinstance(results, (list, tuple)) else 1


def _raise_on_refusal(reports: list[PassReport]) -> None:
    refused = [f"{r.name} refused {node}: {reason}" for r in reports for node, reason in r.refused]
    if refused:
        raise TPUOptimizationError(
            f"strict=True and passes refused {len(refused)} match(es). {'; '.join(refused[:5])}. "
            "Change these lines, disable the pass, or allow refusals with strict=False."
        )
