"""`as_strided` and its scatter name places in memory: of the tensor that owns it, as eager lays that out.

A program has values and no memory. Its tensors are dense and lie in the order of their dimensions: what owns the memory
is permuted to lie so, before places are taken and after they are written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.passes.base import calls
from kp_dynamo.passes.insertion import insert_call, replace_node
from kp_dynamo.source_lines import user_line
from kp_dynamo.view_chain import base_of

aten = torch.ops.aten

_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_WRITES = (aten.as_strided_scatter.default,)


def resolve_memory_places(graph: fx.Graph) -> None:
    """Edit a graph as AOTAutograd has traced it, with the strides of its fake tensors.

    Raises:
        XLACompilationError: The memory has places that no tensor of the graph holds, or its order is not known.
    """
    for node in list(calls(graph, *_READS, *_WRITES)):
        base = base_of(node.args[0])
        order = _order(base.meta["val"])
        if order is None:
            raise _refused(node, "the tensor has gaps in memory, or its strides depend on a size")
        if _may_be_written_input(base):
            raise _refused(node, "it may be an argument that was written to, and that one lies otherwise in its memory")
        if base is not node.args[0] or order != sorted(order) or _offset(base) != 0:
            _resolve(node, base, order)


def _resolve(node: fx.Node, base: fx.Node, order: Sequence[int]) -> None:
    x, source = node.args[0], node.args[1 : 1 + (node.target in _WRITES)]
    size, stride, *given = node.args[1 + len(source) :]
    offset = given[0] if given and given[0] is not None else _offset(x)
    place = _place(node, base, size, stride, offset)
    with node.graph.inserting_before(node):
        memory = insert_call(node.graph, aten.permute.default, (base, list(order)), {}, like=node)
        new = insert_call(node.graph, node.target, (memory, *source, *place), {}, like=node)
        if source:
            new = _seen_as(x, new, base, order)
    replace_node(node, new)


def _seen_as(x: Any, written: fx.Node, base: fx.Node, order: Sequence[int]) -> fx.Node:
    """`x`, in memory that was written to."""
    graph = written.graph
    if x is base:
        back = [order.index(d) for d in range(len(order))]
        return insert_call(graph, aten.permute.default, (written, back), {}, like=written)
    value = x.meta["val"]
    sizes = (*value.shape, *value.stride(), _offset(x))
    if not all(isinstance(n, int) for n in sizes):
        raise _refused(written, "it writes to a view whose size varies")
    place = (list(value.shape), list(value.stride()), _offset(x) - _offset(base))
    return insert_call(graph, aten.as_strided.default, (written, *place), {}, like=written)


def _place(node: fx.Node, base: fx.Node, size: Any, stride: Any, offset: Any) -> tuple[Any, Any, Any]:
    """Sizes, strides and offset in the part of the memory that `base` holds."""
    start = _offset(base)
    if start == 0 and not isinstance(offset, int):
        return size, stride, offset
    if not isinstance(start, int) or not isinstance(offset, int):
        raise _refused(node, "where its memory begins varies")
    offset -= start
    numbers = (*size, *stride, base.meta["val"].numel())
    if all(isinstance(n, int) for n in numbers) and math.prod(size):
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or last >= base.meta["val"].numel():
            raise _refused(node, "the memory begins before the tensor, or goes on behind it")
    return size, stride, offset


def _may_be_written_input(base: fx.Node) -> bool:
    """Whether a value may stand for an argument after a write in place, whose memory begins or lies elsewhere.

    The graph has a new value for each write: `x.add_(1)` and `x + 1` look alike in it.
    """
    source = base
    while source.op == "call_function" and source.args and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    value, other = base.meta["val"], source.meta.get("val")
    if source is base or source.op != "placeholder" or not isinstance(other, torch.Tensor):
        return False
    if len(value.shape) != len(other.shape) or value.dtype != other.dtype:
        return False
    pairs = (*zip(value.shape, other.shape, strict=True), *zip(value.stride(), other.stride(), strict=True))
    is_of_its_shape = all(statically_known_true(a == b) for a, b in pairs[: value.dim()])
    begins_alike = statically_known_true(other.storage_offset() == 0)
    return is_of_its_shape and not (begins_alike and all(statically_known_true(a == b) for a, b in pairs))


def _refused(node: fx.Node, reason: str) -> XLACompilationError:
    return XLACompilationError(
        f"{node.target}{user_line(node)} takes places in the memory of a tensor: {reason}. Allowed: places that one "
        "dense tensor holds. Slice the tensor instead, or take them of x.contiguous()."
    )


def _offset(node: Any) -> Any:
    return node.meta["val"].storage_offset()


def _order(value: torch.Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory to the innermost; None unless the tensor is known to be dense."""
    order = sorted(range(value.dim()), key=lambda d: -_hint(value.stride(d)))
    expected: Any = 1
    for d in reversed(order):
        if statically_known_true(value.shape[d] == 1):
            continue
        if not statically_known_true(value.stride(d) == expected):
            return None
        expected = expected * value.shape[d]
    return order


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
