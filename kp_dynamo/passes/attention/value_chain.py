"""Follows the probabilities of an attention from its softmax to the matmul with the values. Does not edit the graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS
from kp_dynamo.passes.attention.dropout import AppliedDropout, dropout_of
from kp_dynamo.passes.attention.score_chain import replaced_value
from kp_dynamo.passes.attention.sinks import Sinks
from kp_dynamo.passes.base import Refusal

aten = torch.ops.aten

# How many ops to look through for the matmul with the values.
_MAX_STEPS = 6


@dataclass(frozen=True)
class ValueChain:
    """The nodes from the softmax to the matmul with the values.

    Attributes:
        second: The matmul.
        weights: Its first operand.
        steps: Pairs (node, the probabilities that it reads).
        seen: The nodes before the matmul.
        zeroes_rows: Whether a row without a score above -inf becomes 0: torch's "safe" softmax.
        dropout: The dropout of the probabilities, or None.
    """

    second: fx.Node
    weights: fx.Node
    steps: list[tuple[fx.Node, fx.Node]]
    seen: set[fx.Node]
    zeroes_rows: bool
    dropout: AppliedDropout | None


def value_chain(softmax: fx.Node, forward: set[fx.Node], sinks: Sinks | None) -> ValueChain | Refusal | None:
    """The chain of a softmax; a refusal if another op lies before the matmul."""
    node, seen, zeroes_rows = softmax, {softmax}, softmax.target is aten._safe_softmax.default
    steps: list[tuple[fx.Node, fx.Node]] = []
    if sinks is not None:
        node, seen = sinks.kept, seen | sinks.inside
    elif rule := _zero_rule(softmax, forward):
        seen |= set(rule)
        node, zeroes_rows = rule[-1], True
    dropout: AppliedDropout | None = None
    while True:
        readers = [user for user in node.users if user in forward or user.op == "output"]
        matmuls = [user for user in readers if user.target is aten.bmm.default and user.args[0] is node]
        if matmuls:
            return ValueChain(matmuls[0], node, steps, seen, zeroes_rows, dropout)
        following = next((user for user in readers if user.target in VIEWS_AND_CASTS), None)
        if following is None and dropout is None and (dropout := dropout_of(node, readers)):
            following = dropout.product
            seen |= set(dropout.nodes)
        if following is None:
            blocker = _op_before_matmul(readers, forward)
            return Refusal(softmax, f"its probabilities pass through {blocker.target}") if blocker else None
        steps.append((following, node))
        node = following
        seen.add(node)


def _op_before_matmul(readers: list[fx.Node], forward: set[fx.Node]) -> fx.Node | None:
    """The reader through which the probabilities reach a matmul: that is an attention too. None if none does."""
    for reader in readers:
        node, num_steps = reader, 0
        while num_steps < _MAX_STEPS and node in forward:
            if node.target is aten.bmm.default:
                return reader
            following = [u for u in node.users if u in forward]
            if not following:
                break
            node, num_steps = following[0], num_steps + 1
    return None


def _zero_rule(softmax: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """The nodes of where(all(scores == -inf), 0, softmax), which zeroes rows of -inf; the result is last."""
    scores = softmax.args[0]
    for where in [user for user in softmax.users if user.target is aten.where.self and user in forward]:
        dead, zeros, weights = where.args
        if weights is not softmax or not isinstance(dead, fx.Node) or replaced_value(where, zeros) != 0:
            continue
        equal = dead.args[0]
        if not _is_over_keys(dead) or not isinstance(equal, fx.Node) or equal.target is not aten.eq.Scalar:
            continue
        if equal.args[0] is scores and equal.args[1] == -math.inf:
            zero_nodes = [zeros] if isinstance(zeros, fx.Node) and softmax in zeros.all_input_nodes else []
            return [equal, dead, *zero_nodes, where]
    return []


def _is_over_keys(node: fx.Node) -> bool:
    """Whether a node tests for each row whether all of it is true."""
    value = tensor_of(node)
    if node.target is not aten.all.dim or value is None or node.args[2:] != (True,):
        return False
    return node.args[1] in (-1, value.dim() - 1)
