"""Retraces a graph with the rules: the new graph is correct for every true length up to its sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree

import kp_dynamo.passes.padding.attention
import kp_dynamo.passes.padding.averages
import kp_dynamo.passes.padding.creation
import kp_dynamo.passes.padding.cutting
import kp_dynamo.passes.padding.indexing
import kp_dynamo.passes.padding.losses
import kp_dynamo.passes.padding.norms
import kp_dynamo.passes.padding.numbers
import kp_dynamo.passes.padding.on_cpu
import kp_dynamo.passes.padding.ordering
import kp_dynamo.passes.padding.products
import kp_dynamo.passes.padding.recurrences
import kp_dynamo.passes.padding.reductions
import kp_dynamo.passes.padding.searching
import kp_dynamo.passes.padding.views
import kp_dynamo.passes.padding.windows  # noqa: F401  # importing them registers their rules
from kp_dynamo.passes.padding.atoms import (
    Padded,
    Refused,
    Symbolic,
    equal_sizes,
    is_padded,
    plain,
    product,
    text,
)
from kp_dynamo.passes.padding.call import Call, Like, is_padded_value, unwrapped
from kp_dynamo.passes.padding.masks import Masks
from kp_dynamo.passes.padding.operands import is_concerned
from kp_dynamo.passes.padding.rules import RULES, elementwise, is_elementwise

aten = torch.ops.aten


class PaddingInterpreter(fx.Interpreter):
    """Runs a graph on `Padded` values.

    Args:
        gm: A functional ATen graph.
        masks: Makes masks and true sizes.
    """

    def __init__(self, gm: fx.GraphModule, masks: Masks) -> None:
        super().__init__(gm)
        self._masks = masks

    def run_node(self, n: fx.Node) -> Any:
        try:
            with fx.traceback.set_current_meta(n):
                return self._run(n)
        except Refused as refused:
            raise Refused(refused.reason, n) from None
        except Exception as error:  # a rule, a decomposition, or torch's own tracing of them
            text = (str(error).splitlines() or [""])[0]
            raise Refused(f"tracing at padded sizes failed: {type(error).__name__}: {text}", n) from error

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return super().run_node(node)
        if node.op == "output":
            return fx.map_arg(node.args[0], self.env.__getitem__)
        if node.op == "get_attr":
            value = super().run_node(node)
            if not isinstance(value, torch.Tensor):
                return value
            # As torch does for a tensor that a graph holds: its copy can be traced together with fake tensors.
            return Padded(aten.lift_fresh_copy.default(value), plain(value.shape))
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.env.__getitem__)
        if node.target is operator.getitem and not isinstance(args[0], Padded):
            return args[0][args[1]]
        call = Call(node.target, args, kwargs, self._masks, self._like(node), _seen(node))
        return self._checked(node, self._called(call))

    def _like(self, node: fx.Node) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: Like(t, self._masks), node.meta.get("val"))

    def _called(self, call: Call) -> Any:
        if isinstance(call.like, Symbolic) or not isinstance(call.target, torch._ops.OpOverload):
            size = _run_on_sizes(call)
            if isinstance(size, torch.SymInt):
                self._masks.record_computed(size)
            return size
        needs_rule = is_concerned(call) or _has_symbolic_size(call.like)
        result = RULES[call.target](call) if call.target in RULES and needs_rule else NotImplemented
        if result is not NotImplemented:
            return result
        if not needs_rule:
            return pytree.tree_map_only(torch.Tensor, lambda t: Padded(t, plain(t.shape)), call.unchanged())
        if is_elementwise(call.target):
            return elementwise(call)
        parts = decomposition_table.get(call.target)
        if parts is not None:
            return self._decomposed(call, parts)
        raise Refused("no rule supports this operator along a padded dimension")

    def _decomposed(self, call: Call, decomposition: Callable[..., Any]) -> Any:
        """Run the call as a decomposition, with the rules of its operators."""
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=is_padded_value)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (Padded, Symbolic))]

        def parts(*operands: Any) -> Any:
            filled = list(leaves)
            for place, operand in zip(places, operands, strict=True):
                filled[place] = operand
            args, kwargs = _own_lists(pytree.tree_unflatten(filled, spec))
            results = decomposition(*args, **kwargs)
            return tuple(results) if isinstance(results, (tuple, list)) else results

        operands = [leaves[i] for i in places]
        with disable_proxy_modes_tracing():
            inner = make_fx(parts)(*unwrapped(operands))
        if any(n.target is call.target for n in inner.graph.nodes):
            raise Refused("no rule supports this operator along a padded dimension")
        try:
            return PaddingInterpreter(inner, self._masks).run(*operands, enable_io_processing=False)
        except Refused as refused:
            found = refused.refusal
            raise Refused(f"in its decomposition, {found.node.target}: {found.reason}") from None

    def _checked(self, node: fx.Node, result: Any) -> Any:
        """`result`, if its shapes match the node's; a size that does not scale with the length is refused."""
        wanted = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        got = [v for v in pytree.tree_leaves(result, is_leaf=is_padded_value) if is_padded_value(v)]
        for value, like in zip(got, wanted, strict=False):
            _require_shape(value, like)
            self._masks.note(value)
        return result


def _seen(node: fx.Node) -> tuple[torch.Tensor, ...]:
    values = pytree.tree_leaves(fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val")))
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def _own_lists(tree: Any) -> Any:
    """Copies of a node's lists, which are immutable: some decompositions write to theirs."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_own_lists, tree)) if isinstance(tree, tuple) else list(map(_own_lists, tree))
    return tree


def _require_shape(value: Padded, like: torch.Tensor) -> None:
    if len(value.dims) != like.dim():
        raise Refused(f"the result has {len(value.dims)} dimensions, expected {like.dim()}")
    for atoms, size, real in zip(value.dims, like.shape, value.shape, strict=True):
        if not (equal_sizes(product(atoms), size) and equal_sizes(real, size)):
            raise Refused(f"a size of the result is {text(atoms)} ({real} padded), expected {size}")


def _run_on_sizes(call: Call) -> Any:
    """Size arithmetic uses padded sizes; a rule asks for the true size where a size is a value."""
    if isinstance(call.target, torch._ops.HigherOrderOperator):
        raise Refused("no rule supports graphs inside the graph")
    return call.unchanged()


def _has_symbolic_size(like: Any) -> bool:
    return any(is_padded(size) for t in pytree.tree_leaves(like) if isinstance(t, Like) for size in t.value.shape)
