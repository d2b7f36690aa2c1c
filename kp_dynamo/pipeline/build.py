"""Select and order the passes of a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from kp_dynamo.config.matmul_precision import resolve_matmul_precision
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.graph.step_share import WHOLE, StepShare
from kp_dynamo.graph.weight_matmuls import divided_weights
from kp_dynamo.passes import PASSES
from kp_dynamo.passes.base import GraphPass
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.check_indices import CheckIndices
from kp_dynamo.passes.divide_heads import DivideHeads
from kp_dynamo.passes.exchange_gradients import ExchangeGradients
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.gate_weight_gradients import GateWeightGradients
from kp_dynamo.passes.gather_weights import GatherWeights
from kp_dynamo.passes.mask_padding import MaskPadding
from kp_dynamo.passes.precision.keep_float32 import unknown_op_names
from kp_dynamo.passes.precision.matmul_rules import has_float32_matmul
from kp_dynamo.passes.recompute.budget import Budget
from kp_dynamo.passes.recompute_activations import RecomputeActivations
from kp_dynamo.passes.recompute_attention import RecomputeAttention
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from kp_dynamo.passes.recompute_to_budget import RecomputeToBudget
from kp_dynamo.passes.recompute_to_share import RecomputeToShare
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from kp_dynamo.passes.rewrite_patch_convolution import RewritePatchConvolution
from kp_dynamo.passes.rewrite_stem_convolution import RewriteStemConvolution
from kp_dynamo.sharding.placement import Placement

Pipeline = tuple[GraphPass, ...]

OUR_PASSES: tuple[str, ...] = tuple(str(p.name) for p in PASSES)

# Chips whose two cores are one device. For a GPT in inference a v5p takes 0.502 ms with x as the first operand of the
# matmuls that produce heads, and 0.456 ms with the weight first; a v4 1.868 and 1.774. On v5e and v6e it makes no
# difference, and a T5 is 10% slower.
_WEIGHT_FIRST = ("v4", "v5p")
_SHARE_OF_EXPONENTIALS = 64  # a 64th of the memory, 230 MiB on a v5e


def build_pipeline(
    options: CompileOptions,
    lengths: tuple[str, ...] = (),
    share: StepShare = WHOLE,
    parameters: Collection[int] = (),
    placements: Mapping[int, Placement] | None = None,
) -> Pipeline:
    """The passes for these options, in running order.

    Args:
        options: The options.
        lengths: The symbolic sizes that will be padded.
        share: What the graph, a piece of a divided one, gets of the memory.
        parameters: The positions of the arguments that are parameters.
        placements: How those lie on several chips of which that is known.

    Raises:
        TPUConfigurationError: `disable_passes` or `keep_float32` names an unknown pass or op.
    """
    spread = options.spread
    ours: list[GraphPass] = [
        # First: the other passes then see Python numbers, not tensors that hold one.
        FoldConstants(),
        # Before the loss of a large head is fused.
        *([CheckIndices()] if options.check_indices else []),
        # Before the casts and the masks, which would insert nodes into the pattern that it matches.
        *([RewriteAttention()] if options.fuse else []),
        # Before the passes that introduce other operators: it has rules for ATen and kp::attention.
        *([MaskPadding(lengths)] if lengths else []),
        # After the masks, which have no rule for its operator; before the casts, which have one.
        *([_loss_pass(options)] if options.fuse else []),
        # Before the casts: it matches a matmul followed by its activation.
        *([FuseLinearActivation()] if options.fuse else []),
        # Before the casts, which treat it as a matmul; after the masks, which know convolutions.
        *([RewritePatchConvolution()] if options.fuse else []),
        # After the patches, which need no convolution; before the casts, which then read the image once.
        *([RewriteStemConvolution()] if options.fuse else []),
        *([_casts(options, parameters)] if options.precision == "bfloat16" else []),
        # After the casts, which are placed before the views of a value; before the passes that tag views.
        *([FoldViews(options.chip.name in _WEIGHT_FIRST, _has_one_pass(options))] if options.fuse else []),
        # After the passes that rewrite matmuls.
        *([FoldCasts()] if options.precision == "bfloat16" else []),
        # After the views are folded; before the passes that tag views.
        *([DivideHeads(spread.batch_parts, spread.head_parts)] if spread.head_parts > 1 else []),
        # After the passes that change which views and casts of an activation are read.
        *([RecomputeActivations()] if options.fuse else []),
        # After the casts, which it tags. Always on: a bfloat16 model has casts of its own.
        RecomputeCasts(),
        # After the casts: their results are what would be saved.
        *_recomputation(options, share),
        # Both after the casts and views that they follow to the weights; gradients that are left are summed whole.
        *_sums_and_gathers(options, parameters, placements or {}),
        # Last: the user's passes see the graph that will be lowered.
        *options.extra_passes,
    ]
    _check_names(options)
    return tuple(p for p in ours if p.name not in options.disable_passes)


def build_backward_pipeline(options: CompileOptions) -> Pipeline:
    """The passes for a backward graph after the partitioner, which has decided what to recompute."""
    ours: tuple[GraphPass, ...] = (
        GateRecomputation(),
        # After the gates of recomputation, which bring gradients of one layer together.
        *([GateWeightGradients()] if options.fuse else []),
    )
    return tuple(p for p in ours if p.name not in options.disable_passes)


def least_fused_logits(pipeline: Pipeline) -> int | None:
    """The bytes of the smallest logits that a pass fuses with their loss; None if no pass does."""
    return next((p.min_bytes * p.batch_parts for p in pipeline if isinstance(p, FuseLinearCrossEntropy)), None)


def _recomputation(options: CompileOptions, share: StepShare) -> Pipeline:
    match options.checkpoint:
        case "off":
            return ()
        case "attention":
            return (RecomputeAttention(),)
        case "blocks":
            return (RecomputeBlocks(share.scope),)
        case "auto":
            least = () if "checkpoint" in options.given else (RecomputeAttention(),)
            return (*least, RecomputeToBudget(_budget(options, share)))
        case kept:
            return (RecomputeToShare(float(kept)),)


def _budget(options: CompileOptions, share: StepShare) -> Budget:
    chip = options.chip
    return Budget(
        num_bytes=options.memory_budget_bytes,
        optimizer_state_factor=options.optimizer_state_factor,
        vmem_bytes=chip.vmem_bytes,
        narrow_matmuls=_has_one_pass(options),
        is_hard_limit=options.is_memory_bounded,
        share=share,
    )


def _casts(options: CompileOptions, parameters: Collection[int]) -> CastBf16:
    spread, is_narrow = options.spread, options.reduce_dtype == "bfloat16"
    reduced = tuple(sorted(parameters)) if is_narrow and spread.batch_parts > 1 else ()
    return CastBf16(options.cast_scope, options.keep_float32, reduced, is_narrow and spread.head_parts > 1)


def _sums_and_gathers(
    options: CompileOptions, parameters: Collection[int], placements: Mapping[int, Placement]
) -> Pipeline:
    spread = options.spread
    weights = divided_weights(parameters if spread.is_along_batch else (), placements)
    if not (weights or spread.is_along_batch):
        return ()
    num_parts = spread.num_chips // spread.batch_parts
    is_exchanged = options.reduce_scatter == "all_to_all" and spread.batch_parts > 1
    exchange = (ExchangeGradients(weights, spread.batch_parts, num_parts),) if is_exchanged else ()
    return (*exchange, GatherWeights(weights, num_parts))


def _loss_pass(options: CompileOptions) -> FuseLinearCrossEntropy:
    found = FuseLinearCrossEntropy(kept_bytes=_kept_exponentials(options), batch_parts=options.spread.batch_parts)
    # A larger batch fuses logits that are small here, and then saves nothing of them.
    return replace(found, min_bytes=0) if options.is_for_bounds else found


def _kept_exponentials(options: CompileOptions) -> int:
    """The bytes that the loss of a head may save: few of the chip's, and none if the user wants less to be saved."""
    if options.precision != "bfloat16" or options.keep_float32 or options.checkpoint not in ("off", "auto"):
        return 0
    if options.is_for_bounds:
        return 0
    return int(options.memory_budget_bytes) // _SHARE_OF_EXPONENTIALS


def _has_one_pass(options: CompileOptions) -> bool:
    """Whether float32 matmuls take one pass over the matrix unit."""
    return resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision()) == "default"


def _check_names(options: CompileOptions) -> None:
    no_ops = unknown_op_names(options.keep_float32)
    if no_ops:
        raise TPUConfigurationError(
            f"keep_float32={list(no_ops)} is invalid: not an ATen op. Allowed: op names such as 'aten.mm', and "
            "globs of module paths such as 'model.layers.*.mlp'."
        )
    names = {*OUR_PASSES, *(p.name for p in options.extra_passes)}
    unknown = sorted(set(options.disable_passes) - names)
    if unknown:
        raise TPUConfigurationError(
            f"disable_passes={unknown} is invalid: unknown pass. Allowed: {', '.join(sorted(names))}."
        )


def required_precision(graph: fx.Graph, asked: str) -> str:
    """The matmul precision to lower a graph with: `asked`, or "default" if the graph has no float32 matmul.

    libtpu 0.0.21 cannot compile some bfloat16 matmuls at "highest" (T5's attention: "Bad lhs type").
    """
    return asked if has_float32_matmul(graph) else "default"
