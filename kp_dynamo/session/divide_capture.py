"""Decides whether a capture is divided at its repeated blocks, or at calls of child modules."""

from __future__ import annotations

import logging

from kp_dynamo.autograd.argument_overlap import overlapping
from kp_dynamo.blocks.block_calls import group_of, result_key
from kp_dynamo.blocks.call_division import block_calls, divide_at_calls
from kp_dynamo.blocks.divider import FoundBlocks, find_blocks
from kp_dynamo.blocks.division import Division, Undivided
from kp_dynamo.blocks.policy import (
    CHILD_SECONDS,
    LEAST_REPEATS,
    group_sizes,
    is_block,
    num_calls,
    step_seconds,
)
from kp_dynamo.capture.capture import Capture
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.session.compile_plan import CompilePlan
from kp_dynamo.session.division_cost import DivisionCost, speed_for
from kp_dynamo.session.padded_pieces import reason_against_padding
from kp_dynamo.telemetry.warn_once import warn_once

logger = logging.getLogger(__name__)


def division_of(plan: CompilePlan, capture: Capture) -> Division | Undivided | None:
    """A capture as pieces, or why it stays whole; None if that is not asked.

    Args:
        plan: How it is compiled.
        capture: The capture, without the true lengths that buckets add to it.

    Raises:
        TPUOptimizationError: blocks="on" or a number, and `strict`, and it stays whole.
    """
    if plan.options.blocks == "off" or capture.passed is not None:
        return None
    found = _divided(plan, capture)
    if isinstance(found, Undivided):
        report_whole(found, plan.options)
    return found


def report_whole(found: Undivided, options: CompileOptions) -> None:
    """Warn that blocks="on", or a number, has no effect.

    Raises:
        TPUOptimizationError: `strict` is set.
    """
    if options.divides_always:
        message = f"blocks={options.blocks!r} has no effect on a graph: {found.reason}"
        if options.strict:
            raise TPUOptimizationError(f"strict=True and {message}. Try: blocks='auto', or strict=False.")
        warn_once(logger, "%s. It is compiled as a whole.", message)


def _divided(plan: CompilePlan, capture: Capture) -> Division | Undivided:
    options = plan.options
    if options.lowering == "stock":
        return Undivided("lowering='stock'")
    found = find_blocks(capture, is_block, least=_least(options), with_modules=options.reads_modules)
    if isinstance(found, Undivided):
        return found
    if options.blocks == "auto":
        return _that_pays(found, plan, capture)
    return _if_right(found.division(options.blocks if isinstance(options.blocks, int) else 1), plan, capture)


def _least(options: CompileOptions) -> int:
    return LEAST_REPEATS["auto" if options.blocks == "auto" else "on"]


def _if_right(found: Division | Undivided, plan: CompilePlan, capture: Capture) -> Division | Undivided:
    if isinstance(found, Undivided):
        return found
    if found.written and overlapping(plan.capture.inputs, frozenset(found.written)):
        return Undivided("it writes to an input that overlaps another in memory")
    if plan.options.donate == "mutated" and found.reads_written_inputs_again:
        return Undivided("donate='mutated', and a later piece reads an input that the graph writes to")
    if plan.bucketing is None:
        return found
    reason = reason_against_padding(found, capture, strict=plan.options.strict)
    return found if reason is None else Undivided(f"its lengths are padded to buckets, and {reason}")


def _that_pays(found: FoundBlocks, plan: CompilePlan, capture: Capture) -> Division | Undivided:
    """One layer a program if the calls are cheap beside the step, else as few layers as make them cheap."""
    one = _if_right(found.division(), plan, capture)
    if isinstance(one, Undivided):
        return one
    cost = DivisionCost(one, plan)
    blocks = [(repeat.period, repeat.count) for repeat in found.repeats]
    least, others = _least(plan.options), len(one.schedule.steps) - sum(n for _, n in blocks)
    num_steps = {k: others + num_calls(blocks, least, k) for k in (1, *group_sizes(blocks, least))}
    for layers in (k for k, number in num_steps.items() if cost.is_small(number)):
        division = one if layers == 1 else _if_right(found.division(layers), plan, capture)
        if isinstance(division, Division) and cost.is_small(len(division.schedule.steps)):
            return division
    return Undivided(cost.text(len(one.schedule.steps)))


def _if_hidden(division: Division, plan: CompilePlan) -> Division | Undivided:
    """A division at calls that nobody asked for, if the device surely works as long as the host calls them."""
    children = [piece.call for piece in division.pieces if piece.call is not None]
    pieces = [(piece.effects, piece.runs) for piece in division.pieces if piece.call is None]
    pieces += [(tuple(group_of(call).work.get(result_key(call), ())), 1) for call in children]
    step, host = step_seconds(pieces, speed_for(plan), trains=False), len(children) * CHILD_SECONDS
    if len(children) >= LEAST_REPEATS["auto"] and host <= step:
        return division
    return Undivided(
        f"{len(children)} calls add {host * 1e3:.1f} ms of host time to a step of {step * 1e3:.1f} ms, or are few"
    )


def divided_at_calls(plan: CompilePlan) -> Division | Undivided:
    """The capture of a plan, divided at the calls of child modules that are compiled by themselves.

    Raises:
        TPUOptimizationError: `strict`, `compile_blocks` asks for it, and it cannot be divided there.
    """
    if plan.bucketing is not None:
        found: Division | Undivided = Undivided("its lengths are padded to buckets")
    else:
        found = divide_at_calls(plan.capture, with_modules=plan.options.reads_modules)
    found = _if_right(found, plan, plan.capture)
    is_asked_for = any(group_of(call).is_asked_for for call in block_calls(plan.capture.gm.graph))
    if isinstance(found, Division) and not is_asked_for and not plan.options.divides_always:
        found = _if_hidden(found, plan)
    if isinstance(found, Undivided):
        message = f"compile_blocks has no effect on a graph: {found.reason}"
        if not is_asked_for:
            logger.debug("every child module is followed in a graph: %s", found.reason)
            return found
        if plan.options.strict:
            raise TPUOptimizationError(f"strict=True and {message}. Try: strict=False, or no compile_blocks.")
        warn_once(logger, "%s. torch.compile follows every call of its modules instead.", message)
    return found
