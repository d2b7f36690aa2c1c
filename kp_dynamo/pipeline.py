"""Which passes run on a graph, in what order, and what happens around each of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import fx

from kp_dynamo.config.options import CompileOptions, resolve_matmul_precision
from kp_dynamo.exceptions import TPUConfigurationError, TPUOptimizationError, TPUOutOfMemoryError
from kp_dynamo.graph.editing import check_values
from kp_dynamo.graph.least_memory import REMEDIES
from kp_dynamo.hardware import memory_budget_bytes
from kp_dynamo.passes import PASSES
from kp_dynamo.passes.base import GraphPass, PassReport
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.checkpoint_activations import (
    CheckpointAttention,
    CheckpointAuto,
    CheckpointBlocks,
    CheckpointShare,
)
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.layout.memory_places import refuse_places_of_inputs, resolve_memory_places
from kp_dynamo.passes.layout.strides import keep_strides, result_values
from kp_dynamo.passes.mask_padding import MaskPadding
from kp_dynamo.passes.precision.keep_float32 import unknown_op_names
from kp_dynamo.passes.precision.matmul_rules import has_float32_product
from kp_dynamo.passes.recompute.budget import Budget, BudgetError
from kp_dynamo.passes.recompute_activations import RecomputeActivations
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from kp_dynamo.telemetry import log
from kp_dynamo.telemetry.counters import TELEMETRY

Pipeline = tuple[GraphPass, ...]

_OUR_NAMES = tuple(p.name for p in PASSES)

# Chips of two cores that are one device. With heads as products of x and a weight a v5p takes 0.502 ms for a GPT in
# inference, and 0.456 with the weight first; a v4 1.868 and 1.774. v5e and v6e: no difference, and a T5 slower by 10%.
_WEIGHT_FIRST = ("v4", "v5p")


def build_pipeline(options: CompileOptions, lengths: tuple[str, ...] = ()) -> Pipeline:
    """The passes for these options, top to bottom; `lengths` are the symbolic sizes that will be padded.

    Raises:
        TPUConfigurationError: `disable_passes` or `keep_float32` names what there is not.
    """
    ours: list[GraphPass] = [
        # First, so that the others see numbers and not tensors that hold one.
        FoldConstants(),
        # Before the casts, which would stand between what it matches; before the masks, for the same reason.
        *([RewriteAttention()] if options.fuse else []),
        # Before all that changes a graph's operators further: it knows ATen's, and kp::attention.
        *([MaskPadding(lengths)] if lengths else []),
        # Before the casts: it matches a product next to its activation.
        *([FuseLinearActivation()] if options.fuse else []),
        *([CastBf16(options.cast_scope, options.keep_float32)] if options.precision == "bfloat16" else []),
        # After the casts, which stand before the views of a value; before what tags views.
        *([FoldViews(weight_first=options.chip.name in _WEIGHT_FIRST)] if options.fuse else []),
        # After what decides how products are written.
        *([FoldCasts()] if options.precision == "bfloat16" else []),
        # After what decides which views and casts of an activation are read.
        *([RecomputeActivations()] if options.fuse else []),
        # After the casts, which it tags; also those of a model that is in bfloat16 by itself.
        RecomputeCasts(),
        # After the casts, whose results are what would be saved.
        *_checkpoints(options),
        # The user's see what will be lowered.
        *options.extra_passes,
    ]
    _check_names(options)
    return tuple(p for p in ours if p.name not in options.disable_passes)


def build_backward_pipeline(options: CompileOptions) -> Pipeline:
    """The passes for a backward graph behind the partitioner, which has decided what is computed again."""
    return tuple(p for p in (GateRecomputation(),) if p.name not in options.disable_passes)


def _checkpoints(options: CompileOptions) -> Pipeline:
    match options.checkpoint:
        case "off":
            return ()
        case "attention":
            return (CheckpointAttention(),)
        case "blocks":
            return (CheckpointBlocks(),)
        case "auto":
            least = () if "checkpoint" in options.given else (CheckpointAttention(),)
            return (*least, CheckpointAuto(_budget(options)))
        case share:
            return (CheckpointShare(float(share)),)


def _budget(options: CompileOptions) -> Budget:
    chip = options.chip
    return Budget(
        num_bytes=memory_budget_bytes(chip, options.memory_fraction, options.memory_budget_gb),
        optimizer_state_factor=options.optimizer_state_factor,
        vmem_bytes=chip.vmem_bytes,
        narrow_products=resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision())
        == "default",
        is_hard_limit=options.is_memory_bounded,
    )


def _check_names(options: CompileOptions) -> None:
    no_ops = unknown_op_names(options.keep_float32)
    if no_ops:
        raise TPUConfigurationError(
            f"keep_float32: {no_ops[0]!r} is no ATen op; allowed: op names such as 'aten.mm', and "
            "globs of module paths such as 'model.layers.*.mlp'"
        )
    names = {*_OUR_NAMES, *(p.name for p in options.extra_passes)}
    unknown = sorted(set(options.disable_passes) - names)
    if unknown:
        raise TPUConfigurationError(
            f"disable_passes: there is no pass {unknown[0]!r}; allowed: {', '.join(sorted(names))}"
        )


def check_captured(graph: fx.Graph) -> None:
    """Refuse what is wrong behind the program already: in Dynamo's graph, whose inputs are XLA tensors.

    Raises:
        XLACompilationError: A view of an input begins at an offset in its memory that the graph names.
    """
    refuse_places_of_inputs(graph)


def prepare_graph(graph: fx.Graph, *, writes_to_inputs: bool, on_device: bool) -> None:
    """What comes before all passes, once for a graph as AOTAutograd has traced it.

    Args:
        graph: Edited in place.
        writes_to_inputs: It writes to an argument in place.
        on_device: Its arguments are XLA tensors.

    Raises:
        XLACompilationError: An operator takes places in memory that no tensor of the graph holds.
    """
    resolve_memory_places(graph, writes_to_inputs=writes_to_inputs, on_device=on_device)


def run_pipeline(gm: fx.GraphModule, pipeline: Pipeline, options: CompileOptions, graph_name: str) -> list[PassReport]:
    """Run the passes on `gm` in place; lint, recompile, time, count, trace and dump around each.

    Raises:
        TPUOptimizationError: A pass raised, or left a graph that is not well formed; names it and those before it.
        XLACompilationError: A pass refused something and `strict` is set.
    """
    reports: list[PassReport] = []
    start = time.perf_counter()
    _dump(gm, options, f"{graph_name}.0.captured")
    log.trace_graph(gm, f"{graph_name}.before_passes")
    seen = result_values(gm.graph)
    for number, graph_pass in enumerate(pipeline, start=1):
        reports.append(_run_pass(gm, graph_pass, [r.name for r in reports]))
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
            raise TypeError(f"it returned {type(report).__name__}, not a PassReport")
        is_ours = graph_pass.name in _OUR_NAMES
        if report.rewritten or not is_ours:  # ours say 0 of a graph that is as it was; a user's may do so by mistake
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
            f'Take it out with options={{"disable_passes": ["{graph_pass.name}"]}}.'
        ) from cause
    return report


def _check_edited(graph: fx.Graph, signature: tuple[list[str], int]) -> None:
    graph.lint()
    if _signature(graph) != signature:
        raise ValueError("it changed the inputs of the graph, or the number of its results")


def product_precision(graph: fx.Graph, asked: str) -> str:
    """The precision to lower a graph at: the one asked for, or "default" where no float32 product could tell.

    libtpu 0.0.21 cannot compile some bfloat16 products at "highest" (T5's attention: "Bad lhs type").
    """
    return asked if has_float32_product(graph) else "default"


def _signature(graph: fx.Graph) -> tuple[list[str], int]:
    """Names of the inputs, and the number of results."""
    results = next(n for n in graph.nodes if n.op == "output").args[0]
    inputs = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    return inputs, len(results) if isinstance(results, (list, tuple)) else 1


def _raise_on_refusal(reports: list[PassReport]) -> None:
    refused = [f"{r.name} refused {node}: {reason}" for r in reports for node, reason in r.refused]
    if refused:
        raise TPUOptimizationError(
            f"strict=True and {len(refused)} place(s) were refused. {'; '.join(refused[:5])}. "
            "Change these lines, disable the pass, or allow refusals with strict=False."
        )


def _dump(gm: fx.GraphModule, options: CompileOptions, stem: str) -> None:
    if options.dump_dir is not None:
        _write(options.dump_dir, f"{stem}.py", gm.print_readable(print_output=False))


def _dump_reports(reports: list[PassReport], options: CompileOptions, graph_name: str) -> None:
    if options.dump_dir is not None:
        rows = [
            {"pass": r.name, "rewritten": r.rewritten, "refused": [list(x) for x in r.refused], "notes": list(r.notes)}
            for r in reports
        ]
        _write(options.dump_dir, f"{graph_name}.report.json", json.dumps(rows, indent=1))


def _write(folder: Path, name: str, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    except OSError as cause:
        raise TPUConfigurationError(
            f"dump_dir={str(folder)!r} cannot be written: {cause.strerror}. Name a folder that this user may write to."
        ) from cause
