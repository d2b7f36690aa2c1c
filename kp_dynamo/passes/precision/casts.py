"""The bfloat16 and the float32 form of each value of a graph: casts each value once, and cancels inverse casts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_non_overlapping_and_dense

from kp_dynamo.graph.editing import FakeRuns, insert_call
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import PARTS, VIEWS, users_through
from kp_dynamo.passes.precision.cast_nodes import ADDED, is_bfloat16, is_downcast, is_float32, is_upcast, origins

aten = torch.ops.aten


class Casts:
    """The casts of one graph, found or added while a pass walks it in order.

    Float32 readers of a value keep reading its node; after `narrow_result` that node is an upcast of the bfloat16 one.
    `narrow` returns the bfloat16 form. For views and exact values (upcasts) it reads the value before the upcast. For
    other values it adds a cast, placed before the views.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.num_removed = 0
        self._runs = FakeRuns()
        self._narrow: dict[fx.Node, fx.Node] = {}  # float32 node -> its bfloat16 form
        self._wide: dict[fx.Node, fx.Node] = {}  # bfloat16 node -> its upcast
        self._exact: set[fx.Node] = set()  # upcasts
        self._produced: set[fx.Node] = set()  # upcasts of results that this pass put into bfloat16

    def register_cast(self, node: fx.Node) -> None:
        """Record a cast of the graph, or make its users read an existing value instead.

        A result of the graph keeps its cast: it would become an alias of an input or of another result.
        """
        source = node.args[0]
        assert isinstance(source, fx.Node), "the caller has seen a cast of a tensor"
        is_result = any(user.op == "output" for user in users_through(node, VIEWS + PARTS))
        known = self._wide.get(source) if is_upcast(node) else self._narrow.get(source)
        if known is None and is_downcast(node) and self.is_exact(source) and not is_result:
            known = self.narrow(source, before=node)
        if known is not None and not is_result:
            node.replace_all_uses_with(known)
            self.num_removed += 1
        elif is_upcast(node):
            self._record_upcast(source, node)
        else:
            self._narrow.setdefault(source, node)

    def is_exact(self, node: fx.Node) -> bool:
        """Whether bfloat16 represents a float32 node exactly: it is an upcast."""
        return all(origin in self._exact for origin in origins(node))

    def produced_in_bf16(self, node: fx.Node) -> bool:
        """Whether an op that this pass put into bfloat16 produced the value."""
        return all(origin in self._produced for origin in origins(node))

    def narrow(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The bfloat16 form of a float32 node; new nodes are added before `before`, a later node."""
        if node not in self._narrow:
            self._narrow[node] = self._narrowed(node, before)
        return self._narrow[node]

    def upcast(self, narrow: fx.Node, before: fx.Node) -> fx.Node:
        """The float32 form of a bfloat16 node."""
        if narrow not in self._wide:
            with self.graph.inserting_before(before):
                self._record_upcast(narrow, self._cast(narrow, torch.float32, like=before))
        return self._wide[narrow]

    def narrow_result(self, node: fx.Node) -> fx.Node:
        """Recompute the fake value of `node` after a change of its operands, and upcast results that are bfloat16 now.

        Returns the float32 node of the value.
        """
        was_float32 = is_float32(node)
        self._runs.set_value(node)
        if was_float32 and is_bfloat16(node):
            with self.graph.inserting_after(node):
                wide = self._cast(node, torch.float32, like=node)
            node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
            self._record_upcast(node, wide)
            self._produced.add(wide)
            return wide
        if not isinstance(node.meta["val"], torch.Tensor):
            for user in [user for user in node.users if user.target is operator.getitem]:
                self.narrow_result(user)
        return node

    def _narrowed(self, node: fx.Node, before: fx.Node) -> fx.Node:
        if not self._casts_commute(node):
            with self.graph.inserting_before(before):
                return self._cast(node, torch.bfloat16, like=node if node.op == "call_function" else before)
        sources = {source: self.narrow(source, before) for source in node.all_input_nodes if _is_data(source)}
        args = fx.map_arg(node.args, lambda source: sources.get(source, source))
        with self.graph.inserting_before(before):
            return self.insert(node.target, args, node.kwargs, like=node)

    def _casts_commute(self, node: fx.Node) -> bool:
        """Whether a cast can move before `node` at no extra cost."""
        if node.target not in VIEWS:
            return node.target in PARTS and self.is_exact(node)
        source = tensor_of(next(origins(node)))
        # A cast returns a dense tensor, on which a view of gaps or overlaps may be impossible.
        return source is None or source.is_contiguous() or self.is_exact(node) or is_non_overlapping_and_dense(source)

    def _cast(self, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        cast = self.insert(aten._to_copy.default, (node,), {"dtype": dtype}, like=like)
        cast.meta[ADDED] = True
        return cast

    def insert(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, like: fx.Node) -> fx.Node:
        """A call at the graph's insertion point; equal calls share one run on fake tensors."""
        return insert_call(self.graph, target, args, kwargs, like=like, runs=self._runs)

    def _record_upcast(self, narrow: fx.Node, wide: fx.Node) -> None:
        self._wide.setdefault(narrow, wide)
        self._narrow[wide] = narrow
        self._exact.add(wide)


def _is_data(node: fx.Node) -> bool:
    return is_float32(node) or node.target in VIEWS + PARTS
