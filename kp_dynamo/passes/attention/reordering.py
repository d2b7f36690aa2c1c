"""Edits a graph: an attention and its backwards with sequences and heads in another order."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from kp_dynamo.graph.editing import erase_unused, insert_call
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.ops.attention_args import AttentionArgs, BackwardArgs
from kp_dynamo.passes.attention.head_order import HeadOrder

aten = torch.ops.aten


@dataclass
class Reordering:
    """An attention, its backwards, and the order of sequences and heads that they get."""

    order: HeadOrder
    attention: fx.Node
    backwards: list[fx.Node]
    _ordered: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        nodes = (self.attention, *self.backwards)
        for node in nodes:
            self._reorder(node)
        for node in reversed(nodes):
            for old in self._results(node):
                self._put(old)
                erase_unused(old)

    def _reorder(self, node: fx.Node) -> None:
        """Insert a call with operands in the new order before the call that it replaces."""
        args = AttentionArgs.of(node)
        with node.graph.inserting_before(node):
            new = replace(args, q=self._of(args.q), k=self._of(args.k), v=self._of(args.v))
            if args.backward is not None:
                new = replace(new, backward=self._backward(args.backward))
            new = replace(new, scoring=self._scoring(args))
            made = insert_call(node.graph, node.target, new.in_order, {}, like=node)
            for old in self._results(node):
                is_part = old is not node
                part = insert_call(node.graph, operator.getitem, (made, old.args[1]), {}, like=old) if is_part else made
                self._ordered[old] = part

    def _backward(self, args: BackwardArgs) -> BackwardArgs:
        statistics = self._of(args.statistics, lead=1)
        return replace(args, grad=self._of(args.grad), result=self._of(args.result), statistics=statistics)

    def _scoring(self, args: AttentionArgs) -> Any:
        """The scoring, whose masks broadcast to six dimensions; dropout reads the sizes of the first four."""
        scoring, num_heads = args.scoring, fake_of(args.q).shape[0] // self.order.batch
        # In a graph, the tensors are nodes.
        masks: list[Any] = [self.order.mask(cast(fx.Node, mask)) for mask in scoring.masks]
        sinks: Any = None if scoring.sinks is None else self.order.mask(cast(fx.Node, scoring.sinks))
        needs_dims = scoring.batch_dims or args.dropout is not None
        dims = self.order.dims(int(num_heads)) if needs_dims else scoring.batch_dims
        return replace(scoring, masks=masks, sinks=sinks, batch_dims=list(dims))

    def _of(self, value: fx.Node, lead: int = 0) -> fx.Node:
        if value not in self._ordered:
            self._ordered[value] = self.order.ordered(value, lead)
        return self._ordered[value]

    @staticmethod
    def _results(node: fx.Node) -> list[fx.Node]:
        """The values that a call returns: its parts, if there are several."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [user for user in node.users if user.target is operator.getitem]

    def _put(self, old: fx.Node) -> None:
        """Put a result of a new call in place of an old one. The backwards, which read the new one, are gone."""
        is_statistics = old is not self.attention and old.args[0] is self.attention and old.args[1] == 1
        if old.users:
            with old.graph.inserting_before(old):
                by_head = self.order.by_head(self._ordered[old], lead=int(is_statistics))
            _read_by_head(old, by_head)


def _read_by_head(old: fx.Node, by_head: fx.Node) -> None:
    """Let the readers of a value [B * H, ...] read one [B, H, ...].

    A reader that reshapes takes it at once, and so do the readers of a cast: in between, sequences and heads would be
    one dimension, in which the parts of a chip are no neighbours.
    """
    graph = old.graph
    for user in list(old.users):
        with graph.inserting_before(user):
            if user.target in RESHAPES:
                user.replace_all_uses_with(_reshaped(by_head, user))
            elif user.target is aten._to_copy.default:
                new = insert_call(graph, user.target, (by_head, *user.args[1:]), user.kwargs, like=user)
                _read_by_head(user, new)
            else:
                user.replace_input_with(old, _reshaped(by_head, old))
        erase_unused(user)


def _reshaped(value: fx.Node, like: fx.Node) -> fx.Node:
    """The value in the shape of a node."""
    shape = list(fake_of(like).shape)
    is_there = list(fake_of(value).shape) == shape
    return value if is_there else insert_call(value.graph, aten.reshape.default, (value, shape), {}, like=like)
