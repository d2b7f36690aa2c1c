"""The order of sequences and heads in which those of each chip are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.editing import insert_call
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES, SAME_ELEMENTS
from kp_dynamo.passes.recompute.tags import tag

aten = torch.ops.aten


@dataclass(frozen=True)
class HeadOrder:
    """(chips along the batch, chips along the heads, sequences of a chip, heads of a chip).

    Attributes:
        batch: Sequences of all chips.
        batch_parts: Chips along the batch.
        head_parts: Chips along the heads.
    """

    batch: int
    batch_parts: int
    head_parts: int

    @staticmethod
    def batch_before(joined: fx.Node) -> int | None:
        """The number of sequences in a value [B * H, ...]: from a value [B, H, ...] with the same elements, or None."""
        shape = fake_of(joined).shape
        for source in _sources(joined):
            found = fake_of(source).shape
            if len(found) == len(shape) + 1 and found[2:] == shape[1:]:
                return int(found[0])
        return None

    def dims(self, num_heads: int) -> tuple[int, int, int, int]:
        """The sizes of the four dimensions."""
        return (
            self.batch_parts,
            self.head_parts,
            self.batch // self.batch_parts,
            num_heads // self.head_parts,
        )

    def ordered(self, joined: fx.Node, lead: int = 0) -> fx.Node:
        """[.., B * H, ...] in the new order, with `lead` dimensions before those; inserted at the insertion point."""
        shape = list(fake_of(joined).shape)
        before, rest, num_heads = shape[:lead], shape[lead + 1 :], int(shape[lead]) // self.batch
        by_head = [*before, self.batch, num_heads, *rest]
        if joined.target is aten._to_copy.default:
            insert = partial(insert_call, joined.graph, like=joined)
            return insert(joined.target, (self.ordered(_first(joined), lead), *joined.args[1:]), joined.kwargs)
        source = next((s for s in _sources(joined) if list(fake_of(s).shape) == by_head), joined)
        chips, heads, sequences, own = self.dims(num_heads)
        return self._moved(source, [*before, chips, sequences, heads, own, *rest], lead, shape)

    def by_head(self, ordered: fx.Node, lead: int = 0) -> fx.Node:
        """[.., B, H, ...] in eager's order, of a value in the new order."""
        shape = list(fake_of(ordered).shape)
        before, rest, num_heads = shape[:lead], shape[lead + 1 :], int(shape[lead]) // self.batch
        parts = [*before, *self.dims(num_heads), *rest]
        return self._moved(ordered, parts, lead, [*before, self.batch, num_heads, *rest])

    def mask(self, mask: fx.Node) -> fx.Node:
        """[B|1, H|1, S|1, T|1] or fewer dimensions as the new order reads it: with six.

        A backward takes the mask as it was, and views it again: torch_xla 2.9 divides no tensor of six dimensions.
        """
        shape = [1] * (4 - fake_of(mask).dim()) + list(fake_of(mask).shape)
        if shape[:2] == [1, 1]:
            return mask
        chips, heads, sequences, own = self.dims(shape[1])
        of_batch = [1, 1] if shape[0] == 1 else [chips, sequences]
        of_heads = [1, 1] if shape[1] == 1 else [heads, own]
        found = self._moved(mask, [*of_batch, *of_heads, *shape[2:]], 0, None)
        tag((found, _first(found)), CheckpointPolicy.MUST_RECOMPUTE)
        return found

    def _moved(self, source: fx.Node, parts: Sequence[int], lead: int, shape: Sequence[int] | None) -> fx.Node:
        """`source` as `parts`, with the second and third dimension after `lead` exchanged, and then in a shape."""
        insert = partial(insert_call, source.graph, kwargs={}, like=source if source.op != "placeholder" else None)
        order = list(range(len(parts)))
        order[lead + 1], order[lead + 2] = lead + 2, lead + 1
        found = insert(aten.reshape.default, (source, list(parts)))
        found = insert(aten.permute.default, (found, order))
        return found if shape is None else insert(aten.reshape.default, (found, list(shape)))


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node has the elements of, in the same order, in other shapes."""
    found = []
    while node.target in (*RESHAPES, *SAME_ELEMENTS):
        node = _first(node)
        found.append(node)
    return found


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first
