"""Select and order the passes of a graph, and run them with checks, timing and dumps."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from kp_dynamo.config.options import CompileOptions, resolve_matmul_precision
from kp_dynamo.exceptions import TPUConfigurationError, TPUOptimizationError, TPUOutOfMemoryError
from kp_dynamo.graph.editing import check_values
from kp_dynamo.graph.least_memory import REMEDIES
from kp_dynamo.graph.places import Place, place_of
from kp_dynamo.hardware import memory_budget_bytes
from kp_dynamo.passes import PASSES
from kp_dynamo.passes.base import GraphPass, PassReport
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.layout.memory_places import refuse_places_of_inputs, resolve_memory_places
from kp_dynamo.passes.layout.strides import keep_strides, result_values
from kp_dynamo.passes.mask_padding import MaskPadding
from kp_dynamo.passes.precision.keep_float32 import unknown_op_names
from kp_dynamo.passes.precision.matmul_rules import has_float32_matmul
from kp_dynamo.passes.recompute.budget import Budget, BudgetError
from kp_dynamo.passes.recompute_activations import RecomputeActivations
from kp_dynamo.passes.recompute_attention import RecomputeAttention
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from kp_dynamo.passes.recompute_to_budget import RecomputeToBudget
from kp_dynamo.passes.recompute_to_share import RecomputeToShare
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from kp_dynamo.telemetry import log
from kp_dynamo.telemetry.counters import TELEMETRY

Pipeline = tuple[GraphPass, ...]

_OUR_NAMES: tuple[str, ...] = tuple(str(p.name) for p in PASSES)

# Chips whose two cores are one device. For a GPT in inference a v5p takes 0.502 ms with x as the first operand of the
# matmuls that produce heads, and 0.456 ms with the weight first; a v4 1.868 and 1.774. On v5e and v6e it makes no
# difference, and a T5 is 10% slower.
_WEIGHT_FIRST = ("v4", "v5p")


def build_pipeline(options: CompileOptions, lengths: tuple[str, ...] = ()) -> Pipeline:
    """The passes for these options, in running order; `lengths` are the symbolic sizes that will be padded.

    Raises:
        TPUConfigurationError: `disable_passes` or `keep_float32` names an unknown pass or op.
    """
    ours: list[GraphPass] = [
        # First: the other passes then see Python numbers, not tensors that hold one.
        FoldConstants(),
        # Before the casts and the masks, which would insert nodes into the pattern that it matches.
        *([RewriteAttention()] if options.fuse else []),
        # Before the passes that introduce other operators: it has rules for ATen and kp::attention.
        *([MaskPadding(lengths)] if lengths else []),
        # Before the casts: it matches a matmul followed by its activation.
        *([FuseLinearActivation()] if options.fuse else []),
        *([CastBf16(options.cast_scope, options.keep_float32)] if options.precision == "bfloat16" else []),
        # After the casts, which are placed before the views of a value; before the passes that tag views.
        *([FoldViews(weight_first=options.chip.name in _WEIGHT_FIRST)] if options.fuse else []),
        # After the passes that rewrite matmuls.
        *([FoldCasts()] if options.precision == "bfloat16" else []),
        # After the passes that change which views and casts of an activation are read.
        *([RecomputeActivations()] if options.fuse else []),
        # After the casts, which it tags. Always on: a bfloat16 model has casts of its own.
        RecomputeCasts(),
        # After the casts: their results are what would be saved.
        *_recomputation(options),
        # Last: the user's passes see the graph that will be lowered.
        *options.extra_passes,
    ]
    _check_names(options)
    return tuple(p for p in ours if p.name not in options.disable_passes)


def build_backward_pipeline(options: CompileOptions) -> Pipeline:
    """The passes for a backward graph after the partitioner, which has decided what to recompute."""
    return tuple(p for p in (GateRecomputation(),) if p.name not in options.disable_passes)


def _recomputation(options: CompileOptions) -> Pipeline:
    match options.checkpoint:
        case "off":
            return ()
        case "attention":
            return (RecomputeAttention(),)
        case "blocks":
            return (RecomputeBlocks(),)
        case "auto":
            least = () if "checkpoint" in options.given else (RecomputeAttention(),)
            return (*least, RecomputeToBudget(_budget(options)))
        case share:
            return (RecomputeToShare(float(share)),)


def _budget(options: CompileOptions) -> Budget:
    chip = options.chip
    return Budget(
        num_bytes=memory_budget_bytes(chip, options.memory_fraction, options.memory_budget_gb),
        optimizer_state_factor=options.optimizer_state_factor,
        vmem_bytes=chip.vmem_bytes,
        narrow_matmuls=resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision())
        == "default",
        is_hard_limit=options.is_memory_bounded,
    )


def _check_names(options: CompileOptions) -> None:
    no_ops = unknown_op_names(options.keep_float32)
    if no_ops:
        raise TPUConfigurationError(
            f"keep_float32={list(no_ops)} is invalid: not an ATen op. Allowed: op names such as 'aten.mm', and "
            "globs of module paths such as 'model.layers.*.mlp'."
        )
    names = {*_OUR_NAMES, *(p.name for p in options.extra_passes)}
    unknown = sorted(set(options.disable_passes) - names)
    if unknown:
        raise TPUConfigurationError(
            f"disable_passes={unknown} is invalid: unknown pass. Allowed: {', '.join(sorted(names))}."
        )


def check_captured(graph: fx.Graph) -> None:
    """Check Dynamo's graph, whose inputs are XLA tensors, for what AOTAutograd's graph no longer shows.

    Raises:
        XLACompilationError: The graph names the storage offset at which a view of an input begins.
    """
    refuse_places_of_inputs(graph)


def prepare_graph(graph: fx.Graph, *, writes_to_inputs: bool, on_device: bool) -> None:
    """Prepare a graph that AOTAutograd has traced, once, before all passes.

    Args:
        graph: Edited in place.
        writes_to_inputs: Whether it writes to an argument in place.
        on_device: Whether its arguments are XLA tensors.

    Raises:
        XLACompilationError: An operator reads or writes memory that no tensor of the graph holds.
    """
    resolve_memory_places(graph, writes_to_inputs=writes_to_inputs, on_device=on_device)


def run_pipeline(gm: fx.GraphModule, pipeline: Pipeline, options: CompileOptions, graph_name: str) -> list[PassReport]:
    """Run the passes on `gm` in place; lint, recompile, time, count, trace and dump around each.

    Raises:
        TPUOptimizationError: A pass raised or left an ill-formed graph, or it refused a match and `strict` is set. The
            message names the pass and those that ran before it.
        TPUOutOfMemoryError: `checkpoint="auto"` cannot fit the budget.
        TPUConfigurationError: `dump_dir` cannot be written.
    """
    reports: list[PassReport] = []
    start = time.perf_counter()
    _dump(gm, options, f"{graph_name}.0.captured")
    log.trace_graph(gm, f"{graph_name}.before_passes")
    seen = result_values(gm.graph)
    for number, graph_pass in enumerate(pipeline, start=1):
        reports.append(_with_places(_run_pass(gm, graph_pass, [r.name for r in reports]), gm.graph))
        _dump(gm, options, f"{graph_name}.{number}.{graph_pass.name}")
        TELEMETRY.passed(graph_name, reports[-1].to_dict())
    keep_strides(gm.graph, seen)
    TELEMETRY.spent("passes", time.perf_counter() - start)
    log.trace_graph(gm, f"{graph_name}.after_passes")
    _dump_reports(reports, options, graph_name)
    if options.strict:
        _raise_on_refusal(reports)
    return reports


def _run_pass(gm: fx.GraphModule, graph_pass: GraphPass, before: list[str]) -> PassReport:
    signature = _signature(gm.graph)
    try:
        report = graph_pass(gm)
        if not isinstance(report, PassReport):
            raise TypeError(f"the pass returned {type(report).__name__}, expected a PassReport")
        is_ours = graph_pass.name in _OUR_NAMES
        if report.rewritten or not is_ours:  # our passes report 0 only for an unchanged graph; a user's may be wrong
            _check_edited(gm.graph, signature)
            if not is_ours:
                check_values(gm.graph)
            gm.recompile()
    except BudgetError as cause:
        raise TPUOutOfMemoryError(f"checkpoint='auto': {cause}. {REMEDIES}") from None
    except Exception as cause:
        ran = f"after {', '.join(before)}" if before else "as the first pass"
        raise TPUOptimizationError(
            f"pass {graph_pass.name!r} failed, run {ran}: {type(cause).__name__}: {cause}. "
            f'Disable it with options={{"disable_passes": ["{graph_pass.name}"]}}.'
        ) from cause
    return report


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


def required_precision(graph: fx.Graph, asked: str) -> str:
    """The matmul precision to lower a graph with: `asked`, or "default" if the graph has no float32 matmul.

    libtpu 0.0.21 cannot compile some bfloat16 matmuls at "highest" (T5's attention: "Bad lhs type").
    """
    return asked if has_float32_matmul(graph) else "default"


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


def _dump(gm: fx.GraphModule, options: CompileOptions, stem: str) -> None:
    if options.dump_dir is not None:
        _write(options.dump_dir, f"{stem}.py", gm.print_readable(print_output=False))


def _dump_reports(reports: list[PassReport], options: CompileOptions, graph_name: str) -> None:
    if options.dump_dir is not None:
        rows = []
        for report in reports:
            fields = report.to_dict()
            rows.append({"pass": fields.pop("name"), **fields})
        _write(options.dump_dir, f"{graph_name}.report.json", json.dumps(rows, indent=1))


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    except OSError as cause:
        raise TPUConfigurationError(
            f"dump_dir={str(folder)!r} is invalid: {cause.strerror}. Allowed: a folder that this user can write to."
        ) from cause
