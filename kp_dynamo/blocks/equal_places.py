"""A vmap whose places give equal results is computed for one of them.

transformers computes a mask by vmap over the batch, and reads the place in the batch only to select the row of a table,
whose rows are equal unless sequences are packed. For 256 chips the mask of each sequence would take minutes and GiB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.blocks.regions import name_of
from kp_dynamo.graph.nodes import called

OPEN, CLOSE = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_ADD, _REMOVE = "_add_batch_dim", "_remove_batch_dim"


@dataclass(frozen=True)
class EqualPlaces:
    """An outermost vmap, until it ends, all of whose places give equal results.

    Attributes:
        opened: The node that opens it.
        level: Its number.
        size: The number of its places.
    """

    opened: fx.Node
    level: int
    size: int

    @classmethod
    def of(cls, opened: fx.Node, nodes: Collection[fx.Node], values: Mapping[fx.Node, Any]) -> Self | None:
        """The vmap that a node opens; None if its places may give other results.

        Args:
            opened: The node.
            nodes: All nodes that are computed, in order.
            values: The values of those before it.
        """
        inside = list(_until_closed(opened, nodes))[1:]
        added = [node for node in inside if name_of(node) == _ADD]
        inner = next((node for node in inside if name_of(node) == OPEN), None)
        # If this vmap is over an input, which is not computed, the first that is added belongs to an inner vmap.
        if not added or (inner is not None and inner < added[0]) or not isinstance(opened.args[0], int):
            return None
        level = added[0].args[2]
        places = [node for node in added if node.args[2] == level]
        with _disable_current_modes():
            if not all(_selects_equal(place, user, values) for place in places for user in place.users):
                return None
        return cls(opened, level, opened.args[0])  # type: ignore[arg-type]  # an int

    def called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The result of a node, computed for the first place and repeated where the vmap ends."""
        name = name_of(node)
        if node is self.opened:
            return called(node, (1, *args[1:]), kwargs)
        if name == _ADD and args[2] == self.level:
            return called(node, (args[0].narrow(args[1], 0, 1), *args[1:]), kwargs)
        if name == _REMOVE and args[1] == self.level:
            one = called(node, (*args[:2], 1, *args[3:]), kwargs)
            sizes = [-1] * one.dim()
            sizes[args[3]] = self.size
            return one.expand(sizes)
        return called(node, args, kwargs)


def _until_closed(opened: fx.Node, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The node that opens a vmap and those inside of it, with those of the vmaps in it."""
    depth = 0
    for node in nodes:
        if node >= opened:
            depth += (name_of(node) == OPEN) - (name_of(node) == CLOSE)
            if not depth:
                return
            yield node


def _selects_equal(place: fx.Node, user: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a node reads the place only as an index into a tensor that is the same for each of them."""
    if user.target not in (torch.ops.aten.index, torch.ops.aten.index.Tensor) or len(user.args) != 2 or user.kwargs:
        return False
    table, indices = values.get(user.args[0]), user.args[1]  # type: ignore[arg-type]  # a node
    index = values.get(place.args[0])  # type: ignore[arg-type]  # a node
    if not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor) or not isinstance(indices, list):
        return False
    if indices.count(place) != 1 or len(indices) > table.dim() or index.dtype is not torch.int64:
        return False
    dim = indices.index(place)
    is_inside = bool(((index >= 0) & (index < table.shape[dim])).all())
    return is_inside and bool((table == table.narrow(dim, 0, 1)).all())
