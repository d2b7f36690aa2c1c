"""How a capture is compiled: its options, passes and buckets, and what of them belongs to the cache key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kp_dynamo.buckets.bucketing import Bucketing, bucketed
from kp_dynamo.buckets.resizing import is_poisoned
from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.cache.call_parts import environment_parts
from kp_dynamo.cache.compile_key import CompileKey, Parts
from kp_dynamo.cache.identity import Uncacheable, identity_of
from kp_dynamo.capture.capture import Capture
from kp_dynamo.config.matmul_precision import resolve_matmul_precision
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.graph.least_memory import MemoryBudget
from kp_dynamo.graph.step_share import WHOLE, StepShare
from kp_dynamo.pipeline import Pipeline, build_backward_pipeline, build_pipeline


@dataclass(frozen=True)
class CompilePlan:
    """How a capture is compiled.

    Attributes:
        capture: The capture; with buckets, it takes the true lengths as extra inputs.
        options: The options of the user.
        pipeline: The passes on joint graphs and inference graphs.
        backward_pipeline: The passes on backward graphs.
        conditions: What the programs depend on besides the graph; None if a pass of the user has no stable identity.
        bucketing: How inputs are padded, or None.
    """

    capture: Capture
    options: CompileOptions
    pipeline: Pipeline
    backward_pipeline: Pipeline
    conditions: Parts | None
    bucketing: Bucketing | None

    @property
    def key(self) -> CompileKey | None:
        """The identity of the capture and of all its compile settings; None if it has no stable identity."""
        if self.capture.key is None or self.conditions is None or self.options.ledger:
            return None  # with a ledger, the values of the inputs decide which passes run
        divides = self.options.blocks if self.capture.passed is None else "off"  # a piece is not divided again
        return CompileKey((*self.capture.key, ("blocks", divides), *self.conditions))

    @property
    def memory_budget(self) -> MemoryBudget | None:
        """The memory that a graph must fit into, or None if the user set no bound."""
        options = self.options
        if not options.is_memory_bounded:
            return None
        room = options.memory_budget_bytes
        return MemoryBudget(options.chip, room, options.checkpoint, options.spread.num_chips)


def plan_for(capture: Capture, options: CompileOptions, share: StepShare = WHOLE) -> CompilePlan:
    """Decide how to compile `capture`, which gets `share` of the memory.

    Raises:
        TPUConfigurationError: The options contradict each other, or name an unknown pass or op.
    """
    if options.donate == "mutated" and options.lowering == "stock":
        raise TPUConfigurationError(
            "donate='mutated' is invalid with lowering='stock': torch_xla's own bridge does not report which "
            "buffers it shares. Allowed: lowering='openxla', or donate='off'."
        )
    if options.check_indices and (options.buckets is not None or options.lowering == "stock"):
        other = "lowering='stock'" if options.buckets is None else "buckets"
        raise TPUConfigurationError(
            f"check_indices=True is invalid with {other}: padding may hold any index, and torch_xla's own bridge has "
            "no operator that raises. Allowed: lowering='openxla' without buckets. Try: check in a run of its own."
        )
    if options.reduce_dtype is not None and (options.precision == "float32" or "cast_bf16" in options.disable_passes):
        other = "precision='float32'" if options.precision == "float32" else "disable_passes=['cast_bf16']"
        raise TPUConfigurationError(
            f"reduce_dtype={options.reduce_dtype!r} is invalid with {other}: the pass 'cast_bf16' rounds the "
            "gradients. Allowed: precision='bfloat16' with the pass, or reduce_dtype=None."
        )
    if options.ledger and capture.mode == "fake":
        raise TPUConfigurationError(
            "ledger=True is invalid for fake tensors, which have no values. Allowed: tensors on the CPU or on the XLA "
            "device. Try: kp_dynamo.explain, which runs the model."
        )
    capture, bucketing = _bucketing(capture, options)
    lengths = bucketing.symbols if bucketing is not None else ()
    pipeline = build_pipeline(options, lengths, share, capture.parameters, capture.placements)
    backward_pipeline = build_backward_pipeline(options)
    device = "cpu" if capture.mode == "fake" else capture.mode
    conditions = _conditions(options, (*pipeline, *backward_pipeline), device)
    return CompilePlan(capture, options, pipeline, backward_pipeline, conditions, bucketing)


def matmul_precision(options: CompileOptions) -> str:
    """The matmul precision that the user asked for, in the options or through torch."""
    return resolve_matmul_precision(options.matmul_precision, torch.get_float32_matmul_precision())


def _bucketing(capture: Capture, options: CompileOptions) -> tuple[Capture, Bucketing | None]:
    if options.buckets is None:
        return capture, None
    buckets = Buckets(options.buckets, options.over_bucket)
    poisons = is_poisoned() or (options.strict and options.dump_dir is not None)
    return bucketed(capture, buckets, poisons=poisons, strict=options.strict)


def _conditions(options: CompileOptions, pipeline: Pipeline, device: str) -> Parts | None:
    try:
        # A redefined class has the same repr.
        passes = identity_of(options.extra_passes)
    except Uncacheable:
        return None
    return (
        ("options", options.key()),
        ("matmul precision", matmul_precision(options)),
        ("pipeline", repr(pipeline)),
        ("passes of the user's own", passes),
        ("tensors on", device),
        *environment_parts(),
    )
