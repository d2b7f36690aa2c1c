"""How the pieces of a divided training step share the memory of the chip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kp_dynamo.blocks.division import Division, Piece
from kp_dynamo.graph.sizes import tensor_bytes
from kp_dynamo.graph.step_share import Scope, StepShare


def step_shares(
    division: Division, inputs: Sequence[Any], budget_bytes: float, optimizer_state_factor: float
) -> list[StepShare]:
    """The share of each piece; all of the budget if the whole step surely fits, so that programs are shared widely.

    What all runs of all blocks save is held at once, at the end of the forward. Memory for activations is divided in
    proportion to the bytes that the operators of a piece read and write.

    Args:
        division: The pieces.
        inputs: The inputs of the whole graph.
        budget_bytes: Memory that the step may use.
        optimizer_state_factor: Bytes of optimizer state per byte of a trainable parameter.
    """
    pieces = division.pieces
    activations = [sum(effects.num_bytes for effects in piece.effects) for piece in pieces]
    total = sum(piece.runs * num_bytes for piece, num_bytes in zip(pieces, activations, strict=True))
    held = _held_bytes(inputs, optimizer_state_factor)
    scopes = [_scope(piece) for piece in pieces]
    if held + 2 * total <= budget_bytes / 2:
        return [StepShare(scope) for scope in scopes]
    inside = [_held_bytes(_own_inputs(piece), optimizer_state_factor) for piece in pieces]
    least = [piece.runs * sum(map(tensor_bytes, _passed_inputs(piece))) for piece in pieces]
    return [
        StepShare(scope, held - own, own, num_bytes / max(total, 1), piece.runs, sum(least) - saved)
        for piece, scope, own, num_bytes, saved in zip(pieces, scopes, inside, activations, least, strict=True)
    ]


def _scope(piece: Piece) -> Scope:
    if piece.runs == 1:
        return "rest"
    return "layer" if piece.layers == 1 else "layers"


def _passed_inputs(piece: Piece) -> list[torch.Tensor]:
    """What a piece saves at least: the tensors that other pieces compute for it."""
    given = (piece.capture.inputs[i] for i in piece.capture.passed or ())
    return [value for value in given if isinstance(value, torch.Tensor)]


def _own_inputs(piece: Piece) -> list[Any]:
    passed = piece.capture.passed or frozenset()
    return [value for i, value in enumerate(piece.capture.inputs) if i not in passed]


def _held_bytes(inputs: Iterable[Any], optimizer_state_factor: float) -> float:
    """Bytes of tensors, and for those that want a gradient also of the gradient and the optimizer's state."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    return sum(tensor_bytes(t) * (2 + optimizer_state_factor if t.requires_grad else 1) for t in tensors)
