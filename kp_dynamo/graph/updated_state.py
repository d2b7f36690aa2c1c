"""Which arguments of a graph are state of others: overwritten, and read for the new value of one of the same sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from kp_dynamo.graph.nodes import tensor_of


def users_of_state(graph: fx.Graph, overwritten: Sequence[int | None]) -> dict[int, tuple[int, ...]]:
    """For each overwritten argument, the other ones of its sizes whose new values are computed from its value.

    AdamW's averages of a parameter have the parameter, and themselves have no state.

    Args:
        graph: An inference graph; its first results are new values of arguments.
        overwritten: For each of the first results, the position of that argument, or None.
    """
    inputs = list(graph.find_nodes(op="placeholder"))
    positions = {node: i for i, node in enumerate(inputs)}
    written = {i for i in overwritten if i is not None}
    users: dict[int, list[int]] = {i: [] for i in written}
    for i, result in zip(overwritten, graph.output_node().args[0], strict=False):  # type: ignore[arg-type]  # a tuple
        if i is None or not isinstance(result, fx.Node) or not (sizes := _sizes(inputs[i])):
            continue
        for read in _inputs_of(result):
            state = positions[read]
            if state != i and state in written and _sizes(read) == sizes:
                users[state].append(i)
    return {i: tuple(found) for i, found in users.items() if found}


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        new = [n for n in _operands(stack.pop()) if n not in found]
        found.update(new)
        stack += new
    return [n for n in found if n.op == "placeholder"]


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a node reads; an element of what an operator on lists returns reads the elements at its position."""
    if node.target is not operator.getitem or "_foreach_" not in str(getattr(node.args[0], "target", "")):
        return node.all_input_nodes
    call: Any = node.args[0]
    position: Any = node.args[1]
    read = [a[position] if isinstance(a, (list, tuple)) else a for a in call.args]
    return [n for n in read if isinstance(n, fx.Node)]


def _sizes(node: fx.Node) -> tuple[object, ...]:
    value = tensor_of(node)
    return () if value is None else tuple(value.shape)
