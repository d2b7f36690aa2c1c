"""Moves what an operator reads before the first node that the operator's results replace."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from kp_dynamo.graph.pure_operators import is_pure


def late_sources(place: fx.Node, nodes: Iterable[fx.Node], replaced: Iterable[fx.Node]) -> list[fx.Node] | None:
    """What `nodes` are computed from at or after `place`, in graph order; None if some of it cannot be moved before.

    Args:
        place: A node.
        nodes: The operands of an operator at that place.
        replaced: Nodes that are computed from the operator.
    """
    stack = [node for node in nodes if node >= place]
    found = set(stack)
    while stack:
        new = {source for source in stack.pop().all_input_nodes if source >= place} - found
        found |= new
        stack += new
    is_movable = not found & set(replaced) and all(_may_move(node) for node in found)
    return sorted(found) if is_movable else None


def move_before(place: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Move nodes, given in graph order, directly before `place`."""
    for node in nodes:
        place.prepend(node)


def _may_move(node: fx.Node) -> bool:
    """Whether a node may run earlier: random numbers are drawn, and users' operators run, in the order of the model."""
    is_number = getattr(node.target, "__module__", "") == "_operator"  # of symbolic sizes, and parts of a result
    return node.op == "get_attr" or is_number or is_pure(node.target)
