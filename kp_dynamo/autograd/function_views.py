"""Views of its arguments that an `autograd.Function` returns.

AOTAutograd regenerates results that are views from their bases, after the graph has run. In torch 2.9, the backward of
an `autograd.Function` between base and view is then lost: `h = x.exp(); return Scale.apply(h), h`, where
`Scale.forward` returns `x.view_as(x)`. A copy of what the function returns is a base of its own, whose gradient passes
through the function. A program's results share no memory, so the copy costs nothing where the base is an intermediate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from kp_dynamo.autograd.undefined_gradients import is_autograd_function


def copy_function_views(gm: fx.GraphModule) -> None:
    """Copy what functions return of their arguments' memory in Dynamo's graph, if AOTAutograd would regenerate it."""
    inputs = {_storage(node) for node in gm.graph.find_nodes(op="placeholder")}
    _copy(gm, inputs)
    for body in _bodies(gm):
        _copy(body, set())  # its inputs may be intermediates


def _bodies(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs that higher-order operators run, such as checkpointed regions, but not those of a function itself."""
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, fx.GraphModule) and not any(map(is_autograd_function, node.users)):
            yield body
            yield from _bodies(body)


def _copy(gm: fx.GraphModule, inputs: set[int | None]) -> None:
    views = [view for node in gm.graph.nodes if is_autograd_function(node) for view in _views(node)]
    views = [view for view in views if _is_regenerated(view, is_of_input=_storage(view) in inputs)]
    for view in views:
        users = list(view.users)
        with gm.graph.inserting_after(view):
            copy = gm.graph.call_method("clone", (view,))
        for user in users:
            user.replace_input_with(view, copy)
        value = view.meta["example_value"]
        with torch.no_grad(), value.fake_mode:
            copy.meta = view.meta | {"example_value": value.clone().requires_grad_()}
    if views:
        gm.recompile()


def _views(function: fx.Node) -> Iterator[fx.Node]:
    """The results of a function that share memory with its arguments, and have a gradient."""
    memory = {_storage(node) for node in function.all_input_nodes} - {None}
    parts = (user for user in function.users if user.target is operator.getitem)
    for node in (function, *parts):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad and _storage(node) in memory:
            yield node


def _is_regenerated(view: fx.Node, *, is_of_input: bool) -> bool:
    """Whether results of the graph are views of it.

    Torch 2.9 knows a result that a function returned as a view of an argument of the graph, but no view of that.
    """
    reached, waiting = {view}, [view]
    while waiting:
        new = {user for user in waiting.pop().users if _storage(user) == _storage(view)} - reached
        reached |= new
        waiting += new
    results = {node for node in reached if any(user.op == "output" for user in node.users)}
    return bool(results - {view} if is_of_input else results)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
