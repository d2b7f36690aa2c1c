"""Chains of view operators between a tensor and a view of it, which can be applied to another tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kp_dynamo.graph.symbol_values import Values, evaluated


@dataclass(frozen=True, eq=False)
class ViewStep:
    """One view: its operator, its arguments after the tensor, and its fake result (a tensor or several).

    It holds no node: nodes of results that are removed from a graph lose their arguments.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    @staticmethod
    def of(node: fx.Node) -> ViewStep:
        args, kwargs = fx.map_arg((node.args[1:], dict(node.kwargs)), lambda n: n.meta["val"])
        return ViewStep(node.target, args, kwargs, node.meta.get("val"))

    def applied(self, tensor: Any, values: Values) -> Any:
        """This view of `tensor`."""
        args, kwargs = pytree.tree_map(lambda size: evaluated(size, values), (self.args, self.kwargs))
        return self.target(tensor, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class ViewChain:
    """Successive views of `base`, in order."""

    base: fx.Node
    base_value: Any
    nodes: tuple[fx.Node, ...]
    steps: tuple[ViewStep, ...]

    @staticmethod
    def of(node: fx.Node, stop: fx.Node | None = None) -> ViewChain:
        """The longest chain of views that ends in `node`; it begins at `stop` if it passes through it."""
        nodes: list[fx.Node] = []
        while node is not stop and _is_view(node):
            nodes.insert(0, node)
            node = node.args[0]  # type: ignore[assignment]  # a view is of a node
        return ViewChain(node, node.meta.get("val"), tuple(nodes), tuple(map(ViewStep.of, nodes)))

    @property
    def value(self) -> Any:
        """The fake tensor of the last view."""
        return self.steps[-1].value if self.steps else self.base_value

    @property
    def is_symbolic(self) -> bool:
        """Whether the position of a view in memory depends on a size of the call."""
        values = [self.base_value, *(step.value for step in self.steps)]
        return any(_is_symbolic(value) for value in pytree.tree_leaves(values))

    def applied(self, tensor: torch.Tensor, values: Values) -> torch.Tensor:
        """The last view, with `tensor` in the place of the base."""
        result: Any = tensor
        for step in self.steps:
            result = step.applied(result, values)
        return result  # type: ignore[no-any-return]


def base_of(node: Any) -> Any:
    """The node whose memory a node shares in eager; anything that is not a view is its own base."""
    while isinstance(node, fx.Node) and _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    # An operator that copies may decompose into views alone (channel_shuffle).
    original = node.meta.get("original_aten", node.target)
    return all(isinstance(op, torch._ops.OpOverload) and op.is_view for op in (node.target, original))


def _is_symbolic(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride(), value.storage_offset()))


_MAY_OVERLAP = (torch.ops.aten.unfold.default, torch.ops.aten.as_strided.default)


def are_disjoint(chains: Sequence[ViewChain]) -> bool:
    """Whether no two views of one base share an element, as far as the graph shows without the sizes of a call."""
    if any(step.target in _MAY_OVERLAP for chain in chains for step in chain.steps):
        return False  # a single view may hold an element twice
    if len(chains) == 1:
        return True
    first = {chain.nodes[:1] for chain in chains}
    pieces = {chain.nodes[1] for chain in chains if len(chain.nodes) > 1 and chain.nodes[1].target is operator.getitem}
    if len(first) == 1 and len(pieces) == len(chains):
        return True
    spans = sorted(span for chain in chains if (span := _span(chain)) is not None)
    return len(spans) == len(chains) and all(a[1] <= b[0] for a, b in pairwise(spans))


def _span(chain: ViewChain) -> tuple[int, int] | None:
    """The first position in memory that a view covers, and the first one after it; None if it depends on a call."""
    value = chain.value
    if chain.is_symbolic or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    reach = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    start = int(value.storage_offset())
    return start, start + (int(reach) + 1 if value.numel() else 0)
