"""Insert calls into the graph that Dynamo captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def insert_call(like: fx.Node, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of a function, or of the method of that name, at the graph's insertion point; `like` says its place."""
    op = "call_method" if isinstance(target, str) else "call_function"
    made = like.graph.create_node(op, target, args, kwargs)
    made.meta = {key: value for key, value in like.meta.items() if key != "example_value"}
    values, named = fx.map_arg((made.args, dict(made.kwargs)), value_of)
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    made.meta["example_value"] = function(*values, **named)
    return made


def value_of(argument: Any) -> Any:
    """The fake value of a node, without the transforms of torch.func that it lies in; anything else is itself."""
    return _unwrapped(argument.meta.get("example_value")) if isinstance(argument, fx.Node) else argument


def _unwrapped(value: Any) -> Any:
    """A tensor outside of `torch.func`, where nothing can compute with one that lies in a transform.

    Of a tensor in `vmap` it is the first sample: a view, as wide as the tensor in there.
    """
    wraps, batch_dims = torch._C._functorch, []
    while isinstance(value, torch.Tensor) and wraps.is_functorch_wrapped_tensor(value):
        if wraps.is_batchedtensor(value):
            batch_dims.append(wraps.maybe_get_bdim(value))
        value = wraps.get_unwrapped(value)
    for dim in reversed(batch_dims):  # the outermost transform first
        value = value.select(dim, 0)
    return value
