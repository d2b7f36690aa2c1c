"""What reads the batch of a divided model reads it in parts.

The hook of a divided model may not pass copies of its arguments on: what the model writes to an argument, or to a list
of them, would be lost. So it leaves `kp.shard_batch` in Dynamo's graph, and nothing reads the result:

    shard_batch = kp.shard_batch(x, [8])    ->    shard_batch = kp.shard_batch(x, [8])
    linear = F.linear(x, w, b)                    linear = F.linear(shard_batch, w, b)
    return (linear,)                              return (linear,)

Refused, and the operator is erased:

1. The graph writes to the memory of x after it: the copy would get it, and not the caller's tensor.
2. It returns a view of x: the caller's writes to the one would not reach the other.

If x needs a gradient, only what follows in the same grad mode reads the copy: one made under `no_grad` passes none on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from kp_dynamo.capture.grad_modes import before_a_change


def divide_batch(gm: fx.GraphModule) -> None:
    """Let readers of the batch read it in parts, in `gm` and in the graphs inside it, in place."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            found = module.graph.find_nodes(op="call_function", target=torch.ops.kp.shard_batch)
            marks = [node for node in found if not node.users]
            returned = _returned_views(module) if marks else set()
            for mark in marks:
                _divide(mark, returned)
            if marks:
                module.recompile()


def _divide(mark: fx.Node, returned: set[int | None]) -> None:
    batch: Any = mark.args[0]
    memory, later = _memory(batch), _after(mark)
    readers = {node for node in _in_its_grad_mode(batch, later) if batch in node.all_input_nodes}
    if not readers or memory is None or memory in returned or _is_written(memory, later):
        mark.graph.erase_node(mark)
    else:
        batch.replace_all_uses_with(mark, delete_user_cb=readers.__contains__)


def _after(mark: fx.Node) -> list[fx.Node]:
    """What follows in its graph, without the output."""
    found, node = [], mark.next
    while node.op not in ("output", "root"):
        found.append(node)
        node = node.next
    return found


def _in_its_grad_mode(batch: fx.Node, later: list[fx.Node]) -> list[fx.Node]:
    """The nodes that may read a copy of the batch. Inside `torch.func`, values have the flags of its transform."""
    value = _value(batch)
    is_number = value is not None and (value.is_floating_point() or value.is_complex())
    if not is_number or (value is batch.meta["example_value"] and not value.requires_grad):
        return later
    return list(before_a_change(later))


def _is_written(memory: int, later: list[fx.Node]) -> bool:
    """Whether one of these nodes may write to this memory. Example values count the writes that Dynamo has run."""
    return any(memory in map(_memory, node.all_input_nodes) and _may_write(node, memory) for node in later)


def _may_write(node: fx.Node, memory: int) -> bool:
    """Not if the result is a tensor of its own. A view of memory that was never written to does not either."""
    values = [value for value in map(_value, (node, *node.all_input_nodes)) if value is not None]
    is_written = any(value.untyped_storage()._cdata == memory and value._version for value in values)
    is_mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return is_written and (is_mutable or _memory(node) in (None, memory))


def _returned_views(gm: fx.GraphModule) -> set[int | None]:
    """The memory that results share with each other or with another value of the graph."""
    counts = Counter(map(_memory, gm.graph.nodes))
    return {memory for memory in map(_memory, gm.graph.output_node().all_input_nodes) if counts[memory] > 1}


def _memory(node: fx.Node) -> int | None:
    value = _value(node)
    return None if value is None else int(value.untyped_storage()._cdata)


def _value(node: fx.Node) -> torch.Tensor | None:
    """The dense tensor of a node, inside of those that vmap and other transforms wrap around it."""
    value = node.meta.get("example_value")
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
