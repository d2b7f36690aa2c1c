"""Decides whether a capture is divided at its repeated blocks, or at calls of child modules."""

from __future__ import annotations

import logging

from kp_dynamo.autograd.argument_overlap import overlapping
from kp_dynamo.blocks.block_calls import group_of, result_key
from kp_dynamo.blocks.call_division import block_calls, divide_at_calls
from kp_dynamo.blocks.division import Division, Undivided, divide
from kp_dynamo.blocks.policy import (
    CHILD_SECONDS,
    LEAST_REPEATS,
    MAX_HOST_SHARE,
    XLA_CPU,
    Speed,
    host_seconds,
    is_block,
    speed_of,
    step_seconds,
    transfer_seconds,
)
from kp_dynamo.capture.capture import Capture
from kp_dynamo.compat import chips
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.session.compile_plan import CompilePlan
from kp_dynamo.session.padded_pieces import reason_against_padding
from kp_dynamo.telemetry.warn_once import warn_once

logger = logging.getLogger(__name__)


def division_of(plan: CompilePlan, capture: Capture) -> Division | Undivided | None:
    """A capture as pieces, or why it stays whole; None if that is not asked.

    Args:
        plan: How it is compiled.
        capture: The capture, without the true lengths that buckets add to it.

    Raises:
        TPUOptimizationError: blocks="on" and `strict`, and it stays whole.
    """
    if plan.options.blocks == "off" or capture.passed is not None:
        return None
    found = _divided(plan, capture)
    if isinstance(found, Undivided):
        report_whole(found, plan.options)
    return found


def report_whole(found: Undivided, options: CompileOptions) -> None:
    """Warn that blocks="on" has no effect.

    Raises:
        TPUOptimizationError: `strict` is set.
    """
    if options.blocks == "on":
        message = f"blocks='on' has no effect on a graph: {found.reason}"
        if options.strict:
            raise TPUOptimizationError(f"strict=True and {message}. Try: blocks='auto', or strict=False.")
        warn_once(logger, "%s. It is compiled as a whole.", message)


def _divided(plan: CompilePlan, capture: Capture) -> Division | Undivided:
    options = plan.options
    if options.lowering == "stock":
        return Undivided("lowering='stock'")
    least = LEAST_REPEATS[options.blocks]
    found = divide(capture, is_block, least=least, with_modules=options.reads_modules)
    if isinstance(found, Undivided):
        return found
    found = _if_right(found, plan)
    if isinstance(found, Undivided):
        return found
    reason = None if plan.bucketing is None else reason_against_padding(found, capture, strict=options.strict)
    if reason is not None:
        return Undivided(f"its lengths are padded to buckets, and {reason}")
    if options.blocks == "on":
        return found
    return _if_it_pays(found, plan)


def _if_right(division: Division, plan: CompilePlan) -> Division | Undivided:
    if division.written and overlapping(plan.capture.inputs, frozenset(division.written)):
        return Undivided("it writes to an input that overlaps another in memory")
    if plan.options.donate == "mutated" and division.reads_written_inputs_again:
        return Undivided("donate='mutated', and a later piece reads an input that the graph writes to")
    return division


def _if_it_pays(division: Division, plan: CompilePlan) -> Division | Undivided:
    trains = plan.capture.records_gradients
    pieces = ((piece.effects, piece.runs) for piece in division.pieces)
    step = step_seconds(pieces, _speed(plan), trains=trains)
    host = host_seconds(len(division.schedule.steps), trains=trains)
    if trains and plan.capture.mode == "cpu":
        host += transfer_seconds(division.passed_bytes)
    if host <= MAX_HOST_SHARE * step:
        return division
    return Undivided(
        f"{len(division.schedule.steps)} calls in place of one add {host * 1e3:.1f} ms of host time to a step of "
        f"{step * 1e3:.1f} ms, more than {MAX_HOST_SHARE:.0%}"
    )


def _if_hidden(division: Division, plan: CompilePlan) -> Division | Undivided:
    """A division at calls that nobody asked for, if the device surely works as long as the host calls them."""
    children = [piece.call for piece in division.pieces if piece.call is not None]
    pieces = [(piece.effects, piece.runs) for piece in division.pieces if piece.call is None]
    pieces += [(tuple(group_of(call).work.get(result_key(call), ())), 1) for call in children]
    step, host = step_seconds(pieces, _speed(plan), trains=False), len(children) * CHILD_SECONDS
    if len(children) >= LEAST_REPEATS["auto"] and host <= step:
        return division
    return Undivided(
        f"{len(children)} calls add {host * 1e3:.1f} ms of host time to a step of {step * 1e3:.1f} ms, or are few"
    )


def _speed(plan: CompilePlan) -> Speed:
    is_on_cpu = plan.capture.mode != "fake" and chips.chip_name() is None
    return XLA_CPU if is_on_cpu else speed_of(plan.options.chip)


def divided_at_calls(plan: CompilePlan) -> Division | Undivided:
    """The capture of a plan, divided at the calls of child modules that are compiled by themselves.

    Raises:
        TPUOptimizationError: `strict`, `compile_blocks` asks for it, and it cannot be divided there.
    """
    if plan.bucketing is not None:
        found: Division | Undivided = Undivided("its lengths are padded to buckets")
    else:
        found = divide_at_calls(plan.capture, with_modules=plan.options.reads_modules)
    found = found if isinstance(found, Undivided) else _if_right(found, plan)
    is_asked_for = any(group_of(call).is_asked_for for call in block_calls(plan.capture.gm.graph))
    if isinstance(found, Division) and not is_asked_for and plan.options.blocks != "on":
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
