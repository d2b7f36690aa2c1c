"""Finds how a result of Dynamo's graph is computed by a head: a linear layer whose parameters are inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from kp_dynamo.graph.nodes import called_name

_VIEWS = ("getitem", "view", "reshape", "contiguous", "squeeze", "unsqueeze", "flatten")
_CASTS = ("float", "to")
_DIVISIONS = ("truediv", "div")
_TANH = "tanh"


@dataclass(frozen=True)
class HeadChain:
    """Logits: views of x, a linear layer, and casts, views, factors and tanh of its result.

    Attributes:
        x: The tensor whose views the layer reads; no view itself.
        linear: The layer.
        nodes: All nodes from x, which is excluded, to the logits.
    """

    x: fx.Node
    linear: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def sources(self) -> tuple[fx.Node, ...]:
        """x and the layer's parameters."""
        return (self.x, *self.linear.all_input_nodes[1:])

    @property
    def is_read(self) -> tuple[bool, ...]:
        """Of each source, whether a gradient of the logits depends on its values."""
        if any(called_name(node) == _TANH for node in self.nodes):
            return (True,) * len(self.sources)
        needs = [source.meta["example_value"].requires_grad for source in self.sources]
        return needs[1], needs[0], *(False,) * (len(needs) - 2)


def head_chain(logits: fx.Node) -> HeadChain | None:
    """The head that computes logits, if it is one."""
    after = list(_before(logits, (*_VIEWS, *_CASTS, *_DIVISIONS, "mul", _TANH)))
    linear = after[-1].all_input_nodes[0] if after else logits
    if called_name(linear) != "linear" or linear.kwargs:
        return None
    first, *parameters = linear.all_input_nodes
    before = list(_before(first, _VIEWS))
    x = before[-1].all_input_nodes[0] if before else first
    if not parameters or any(node.op != "placeholder" for node in parameters) or x in parameters:
        return None
    if x.op == "get_attr" or not isinstance(x.meta.get("example_value"), torch.Tensor):
        return None
    found = HeadChain(x, linear, tuple(reversed([*after, linear, *before])))
    # PyTorch would save the result of tanh, but a replay computes it again, from all of the sources.
    is_exact = all(found.is_read) and len(found.sources) == 2
    return found if is_exact or not any(called_name(node) == _TANH for node in found.nodes) else None


def _before(node: fx.Node, names: tuple[str, ...]) -> Iterator[fx.Node]:
    """A node and what it is computed from, as long as each has one of these names and one operand that is a node."""
    while called_name(node) in names and _is_portable(node):
        yield node
        node = node.all_input_nodes[0]


def _is_portable(node: fx.Node) -> bool:
    """Whether a node computes the same anywhere, linearly in one tensor: in this graph every device is the CPU."""
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    if any(isinstance(leaf, (torch.device, str)) for leaf in tree_leaves((node.args, node.kwargs))):
        return False
    return len(operands) == 1 and (called_name(node) not in _DIVISIONS or node.args[0] is operands[0])
