"""Eager's strides of results, for results that AOTAutograd traces with others (attention in its math form)."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from kp_dynamo.autograd.eager_rules import EagerRules, after_function, may_call_operator_with_rule
from kp_dynamo.autograd.memory_formats import has_free_strides, same_strides
from kp_dynamo.graph.editing import call_key
from kp_dynamo.graph.nodes import EAGER_STRIDES, called

logger = logging.getLogger(__name__)


def eager_results(gm: fx.GraphModule) -> list[Any]:
    """Fake tensors for the results of Dynamo's graph, with eager's strides.

    Dynamo has computed them. Values that depend on an operator whose fake tensors have other strides than in eager are
    recomputed with `eager_rules`.
    """
    values: dict[fx.Node, Any] = {}
    unchanged: set[Any] = set()
    for node in gm.graph.nodes:
        known = _body(gm, node) or node.meta.get("example_value")
        values[node] = known
        is_moved = any(values[n] is not n.meta.get("example_value") for n in node.all_input_nodes)
        if known is not None and node.op in ("call_function", "call_method") and (is_moved or _may_differ(node)):
            values[node] = _recompute_new(gm, node, values, unchanged)
    results = gm.graph.output_node().args[0]
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [values[node] if isinstance(node, fx.Node) else None for node in flat]


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node hands to a higher-order operator, whose results then are always recomputed."""
    body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    return body if isinstance(body, fx.GraphModule) else None


def _may_differ(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # indexing by a tensor copies; by numbers and slices it takes a view
        return any(isinstance(n.meta.get("example_value"), torch.Tensor) for n in node.all_input_nodes[1:])
    if any(has_free_strides(n.meta.get("example_value")) for n in node.all_input_nodes):
        return True
    return may_call_operator_with_rule(node.target if isinstance(node.target, str) else str(node.target))


def _recompute_new(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], unchanged: set[Any]) -> Any:
    """`_recompute`, once for equal calls with fixed sizes, as equal layers have: `unchanged` has those found so far."""
    known = node.meta["example_value"]
    given = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    call = call_key((node.op, node.target, given, known))
    try:
        if call in unchanged:
            return known
    except TypeError:  # symbolic sizes are unhashable
        return _recompute(gm, node, values)
    value = _recompute(gm, node, values)
    if value is known:
        unchanged.add(call)
    return value


def _recompute(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a node under eager's rules; the known one if it is the same or cannot be recomputed."""
    known = node.meta["example_value"]
    mode = next((t.fake_mode for t in pytree.tree_leaves(known) if hasattr(t, "fake_mode")), None)
    if mode is None or any(n.op == "get_attr" and _body(gm, n) is None for n in node.all_input_nodes):
        return known
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    try:
        # Dynamo computes with the Python dispatcher too: in C++, matmul reads sizes as integers, which fixes them.
        with torch.random.fork_rng(devices=[]), torch.no_grad(), mode, enable_python_dispatcher(), EagerRules():  # type: ignore[no-untyped-call]
            value = after_function(node.target, known, called(node, args, kwargs))
        is_copy = _storages(value).isdisjoint(_storages((args, kwargs)))
    except Exception as error:  # noqa: BLE001 - Dynamo could compute it, also under vmap: keep its strides
        logger.debug("%s cannot be recomputed for its strides: %s", node.name, error)
        return known
    is_known = same_strides(value, known) and is_copy
    return known if is_known or not _have_same_sizes(value, known) else value


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}


def _have_same_sizes(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(getattr(a, "dtype", None) == getattr(b, "dtype", None) and _dim(a) == _dim(b) for a, b in pairs)


def _dim(value: Any) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


def record_eager_strides(gm: fx.GraphModule, metadata: Any, eager: Sequence[Any], bases: dict[int, Any]) -> None:
    """Record eager's strides of the results of a forward or inference graph, which callers see for CPU tensors.

    Args:
        gm: The graph. The strides are stored in its output node's meta, as `EAGER_STRIDES`.
        metadata: AOTAutograd's metadata of the graph.
        eager: See `eager_results`.
        bases: Position of the base of result views -> its fake tensor in eager, if known.
    """
    output = gm.graph.output_node()
    results: Any = output.args[0]
    if metadata is None or len(metadata.output_info) != len(eager):
        return
    first = len(metadata.mutated_inp_runtime_indices)
    expected = {first + number: value for number, value in enumerate(eager)} | bases
    output.meta[EAGER_STRIDES] = {
        position: value.stride()
        for position, value in expected.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and _is_alike(results[position], value)
    }


def _is_alike(node: Any, expected: torch.Tensor) -> bool:
    """Whether a result has eager's dtype and shape: its position may hold the tensor that it is a view of."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return value.dtype == expected.dtype and str(value.shape) == str(expected.shape)
