"""Joins the compiled pieces of a divided capture, and gives each its share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kp_dynamo.autograd.argument_overlap import OverlapCheck
from kp_dynamo.autograd.eager_strides import eager_results
from kp_dynamo.blocks.block_calls import group_of
from kp_dynamo.blocks.division import Division
from kp_dynamo.blocks.step_memory import step_shares
from kp_dynamo.capture.capture import Capture, with_dynamo_signature
from kp_dynamo.graph.least_memory import require_room
from kp_dynamo.graph.step_share import StepShare
from kp_dynamo.lowering import with_one_seed
from kp_dynamo.runtime.events import PieceRuns
from kp_dynamo.runtime.pieces import returning_to_host, taking_from_device
from kp_dynamo.runtime.result_memory import ResultMemory
from kp_dynamo.session.compile_plan import CompilePlan
from kp_dynamo.session.padded_pieces import PaddedPieces


def shares_of(division: Division, capture: Capture, plan: CompilePlan) -> list[StepShare]:
    """What each piece gets of the memory.

    Raises:
        TPUOutOfMemoryError: The user set a budget, and the inputs of the whole graph exceed it.
    """
    if plan.memory_budget is not None:
        require_room(capture.gm.graph, "whole", plan.memory_budget)
    options = plan.options
    return step_shares(division, capture.inputs, options.memory_budget_bytes, options.optimizer_state_factor)


def runs_of(division: Division, numbers: Sequence[int | None]) -> tuple[PieceRuns, ...]:
    """What an event says of the pieces, with the numbers of their captures; calls of equal modules are one."""
    found: dict[int, PieceRuns] = {}
    for number, piece in zip(numbers, division.pieces, strict=True):
        same = id(piece) if piece.call is None else id(group_of(piece.call))
        earlier = found[same].modules if same in found else ()
        runs = len(earlier) // piece.layers + piece.runs
        modules = (*earlier, *piece.modules)
        found[same] = PieceRuns(number, piece.module, piece.num_calls, runs, modules, piece.layers)
    return tuple(found.values())


def joined(
    division: Division, capture: Capture, compiled: Sequence[Callable[..., Any]], padding: PaddedPieces | None
) -> Callable[..., Any]:
    """A callable with Dynamo's calling convention that runs the pieces of a divided capture, which are compiled."""
    stays_on_device = any(piece.capture.stays_on_device for piece in division.pieces)
    if stays_on_device:
        pairs = zip(compiled, (piece.capture.passed for piece in division.pieces), strict=True)
        compiled = [taking_from_device(run, passed) if passed else run for run, passed in pairs]
    run = division.schedule.around(compiled) if padding is None else padding.around(division.schedule, compiled)
    run = with_one_seed(run)
    eager = eager_results(capture.gm)
    if capture.mode == "cpu" and stays_on_device:
        inputs = [node.meta.get("example_value") for node in capture.gm.graph.find_nodes(op="placeholder")]
        run = returning_to_host(run, inputs, eager)
    if padding is not None:
        run = padding.whole.wrap(run)
    lays_out_all = padding is not None and capture.mode == "cpu"
    memory = ResultMemory(capture.gm, eager, lays_out_all=lays_out_all)
    if division.written:
        run = _checking(run, OverlapCheck(division.written, {}))
    return with_dynamo_signature(run, capture, memory.around)


def _checking(run: Callable[..., Any], overlap: OverlapCheck) -> Callable[..., Any]:
    """Each piece checks the overlap of its own arguments only."""

    def called(*args: Any) -> Any:
        overlap.require_same(args)
        return run(*args)

    return called
