"""Views of its arguments that an `autograd.Function` returns.

AOTAutograd regenerates results that are views from their bases, after the graph has run. In torch 2.9, the backward of
an `autograd.Function` between base and view is then lost: `h = x.exp(); return Scale.apply(h), h`, where
`Scale.forward` returns `x.view_as(x)`. A copy of what the function returns is a base of its own, whose gradient passes
through the function. A program's results share no memory, so the copy costs nothing where the base is an intermediate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kp_dynamo.autograd.undefined_gradients import is_autograd_function


def keep_backward_of_views(gm: fx.GraphModule) -> None:
    """Have AOTAutograd regenerate no view that a function in Dynamo's graph returned.

    Where the memory is that of an input, results that are views of it become results of a function themselves, which
    AOTAutograd does not regenerate. They share the input's memory as in eager.
    """
    inputs = {_storage(node) for node in gm.graph.find_nodes(op="placeholder")}
    for view in _views(gm.graph):
        if _storage(view) in inputs:
            _return_from_function(view)
        elif _results(view):
            _copy(view)
    for body in _bodies(gm):
        for view in filter(_results, _views(body.graph)):
            _copy(view)  # the inputs of a body may be intermediates
        body.recompile()
    gm.recompile()


def _bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs that higher-order operators run, such as checkpointed regions, but not those of a function itself."""
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, fx.GraphModule) and not any(map(is_autograd_function, node.users)):
            yield body
            yield from _bodies(body)


def _views(graph: fx.Graph) -> list[fx.Node]:
    """The results of functions that share memory with their arguments, and have a gradient."""
    found = []
    for function in filter(is_autograd_function, graph.nodes):
        memory = {_storage(node) for node in function.all_input_nodes} - {None}
        made = (node for node in (function, *function.users) if _is_made_by_function(node))
        found += [node for node in made if _storage(node) in memory and node.meta["example_value"].requires_grad]
    return found


def _is_made_by_function(node: fx.Node) -> bool:
    """Whether a node is a result of a function: of one, or a part of several, but no slice."""
    if node.target is not operator.getitem:
        return is_autograd_function(node) or node.target is returned
    source = node.args[0]
    return isinstance(source, fx.Node) and is_autograd_function(source) and _storage(source) is None


def _results(view: fx.Node) -> list[fx.Node]:
    """The results of the graph that are views of this one, or it."""
    reached, waiting = {view: None}, [view]
    while waiting:
        new = [n for n in waiting.pop().users if _storage(n) == _storage(view) and n not in reached]
        reached |= dict.fromkeys(new)
        waiting += new
    return [node for node in reached if any(user.op == "output" for user in node.users)]


def _copy(view: fx.Node) -> None:
    value = view.meta["example_value"]
    with torch.no_grad(), value.fake_mode:
        copied = value.clone().requires_grad_()
    _insert_after(view, "call_method", "clone", copied, list(view.users))


def _return_from_function(view: fx.Node) -> None:
    for result in _results(view):
        if not _is_made_by_function(result):
            readers = [user for user in result.users if user.op == "output"]
            _insert_after(result, "call_function", returned, result.meta["example_value"], readers)


def _insert_after(node: fx.Node, op: str, target: Any, value: torch.Tensor, readers: list[fx.Node]) -> None:
    with node.graph.inserting_after(node):
        new = node.graph.create_node(op, target, (node,))
    new.meta = node.meta | {"example_value": value}
    for reader in readers:
        reader.replace_input_with(node, new)


def returned(x: torch.Tensor) -> torch.Tensor:
    """A view of `x` that an `autograd.Function` returned."""
    result: torch.Tensor = _Returned.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Returned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
