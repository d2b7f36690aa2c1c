"""Inlines regions of `torch.compiler.nested_compile_region` into Dynamo's graph.

Dynamo traces such a region once, into a graph that a higher-order operator calls. In torch 2.9, AOTAutograd refuses
this operator in a training step that writes to a buffer (BatchNorm), and passes do not look inside it. After inlining,
the graph is the one that Dynamo captures without the decorator.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kp_dynamo.capture.copied_values import CopiedValues
from kp_dynamo.capture.module_renames import Renames, renamed_stack, renames_by_operands, renames_by_stack

_CALL = torch.ops.higher_order.invoke_subgraph


def inline_nested_regions(gm: fx.GraphModule) -> None:
    """Replace each call of a nested region, in `gm` and in the graphs inside it, by the nodes of the region, in place.

    A region that Dynamo traced in another gradient mode remains a call, because its values have other gradient flags.
    """
    for module in list(gm.modules()):
        if isinstance(module, fx.GraphModule):
            _inline_all(module)


def _inline_all(gm: fx.GraphModule) -> None:
    operands_of_first: dict[str, tuple[Any, ...]] = {}
    remaining: set[fx.Node] = set()
    # A region inside a region becomes a call of `gm`, and is inlined in its turn.
    while calls := [node for node in gm.graph.find_nodes(op="call_function", target=_CALL) if node not in remaining]:
        call = calls[0]
        operands = call.args[2:]
        first = operands_of_first.setdefault(str(call.args[1]), operands)
        if _can_inline(gm, call):
            _inline(gm, call, renames_by_operands(first, operands))
        else:
            remaining.add(call)
    if operands_of_first:
        gm.recompile()


def _body(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    attribute: Any = call.args[0]
    body: fx.GraphModule = getattr(gm, attribute.target)
    return body


def _results(body: fx.GraphModule) -> Any:
    return body.graph.output_node().args[0]


def _can_inline(gm: fx.GraphModule, call: fx.Node) -> bool:
    results, values = _results(_body(gm, call)), call.meta.get("example_value")
    if values is None or any(user.target is not operator.getitem for user in call.users):
        return False
    return all(
        isinstance(result, fx.Node) and _requires_grad(_value(result)) == _requires_grad(value)
        for result, value in zip(results, values, strict=True)
    )


def _inline(gm: fx.GraphModule, call: fx.Node, renames: Renames) -> None:
    body, copied = _body(gm, call), CopiedValues()
    new: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    for inside, operand in new.items():
        copied.replace(_value(inside), _value(operand))
    results = _results(body)
    for inside, value in zip(results, call.meta["example_value"], strict=True):
        copied.replace(_value(inside), value)
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with gm.graph.inserting_before(call):
            new[node] = _copy_attribute(gm, body, node) if node.op == "get_attr" else gm.graph.node_copy(node, new.get)
        meta = new[node].meta
        meta["example_value"] = copied.of(_value(node))
        meta["nn_module_stack"] = renamed_stack(meta, {**renames, **renames_by_stack(meta, call.meta)})
    for user in list(call.users):
        position: Any = user.args[1]
        user.replace_all_uses_with(new[results[position]])
        gm.graph.erase_node(user)
    _erase(gm, call)


def _copy_attribute(gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Read an attribute of the region, such as the graph of a checkpoint, from `gm`."""
    name, value = str(node.target), getattr(body, str(node.target))
    while getattr(gm, name, value) is not value:
        name += "_"
    setattr(gm, name, value)
    copy = gm.graph.get_attr(name)
    copy.meta.update(node.meta)
    return copy


def _erase(gm: fx.GraphModule, call: fx.Node) -> None:
    """Erase the call, and the graph of its region if no other call needs it."""
    attribute: Any = call.args[0]
    gm.graph.erase_node(call)
    if not attribute.users:
        gm.graph.erase_node(attribute)
        if not gm.graph.find_nodes(op="get_attr", target=attribute.target):
            delattr(gm, attribute.target)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
