"""What reads the batch of a divided model reads it in parts.

The hook of a divided model may not pass copies of its arguments on: what the model writes to an argument, or to a list
of them, would be lost. So it leaves `kp.shard_batch` in Dynamo's graph, and nothing reads the result:

    shard_batch = kp.shard_batch(x, [8])    ->    shard_batch = kp.shard_batch(x, [8])
    linear = F.linear(x, w, b)                    linear = F.linear(shard_batch, w, b)
    return (linear,)                              return (linear,)

Refused, and the operator is erased:

1. The graph writes to the memory of x: the copy would get it, and not the caller's tensor.
2. It returns a view of x: the caller's writes to the one would not reach the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def divide_batch(gm: fx.GraphModule) -> None:
    """Let readers of the batch read it in parts, in `gm` and in the graphs inside it, in place."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found = module.graph.find_nodes(op="call_function", target=torch.ops.kp.shard_batch)
            marks = [node for node in found if not node.users]
            shared = _written(module) | _returned_views(module) if marks else set()
            for mark in marks:
                _divide(mark, shared)
            if marks:
                module.recompile()


def _divide(mark: fx.Node, shared: set[int | None]) -> None:
    batch: Any = mark.args[0]
    readers = {user for user in batch.users if mark < user and user.op != "output"}
    memory = _memory(batch)
    if not readers or memory is None or memory in shared:
        mark.graph.erase_node(mark)
    else:
        batch.replace_all_uses_with(mark, delete_user_cb=readers.__contains__)


def _written(gm: fx.GraphModule) -> set[int | None]:
    """The memory that the graph writes to. Dynamo ran its writes on the example values, which count them."""
    pairs = [(_memory(node), _value(node)) for node in gm.graph.nodes]
    return {memory for memory, value in pairs if value is not None and value._version}


def _returned_views(gm: fx.GraphModule) -> set[int | None]:
    """The memory that results share with another value of the graph."""
    returned = set(gm.graph.output_node().all_input_nodes)
    of_others = {_memory(node) for node in gm.graph.nodes if node not in returned}
    return set(map(_memory, returned)) & of_others


def _memory(node: fx.Node) -> int | None:
    value = _value(node)
    return None if value is None else int(value.untyped_storage()._cdata)


def _value(node: fx.Node) -> torch.Tensor | None:
    """The dense tensor of a node, inside of those that vmap and other transforms wrap around it."""
    value = node.meta.get("example_value")
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
