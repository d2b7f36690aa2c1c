"""`as_strided` and its scatter address memory: that of the tensor that owns it, in eager's layout.

A program has values and no memory. Its tensors are dense and contiguous. So the tensor that owns the memory is permuted
to its eager layout, before elements are read and after they are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.editing import insert_call, replace_node
from kp_dynamo.graph.nodes import calls, is_tangent
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.graph.view_chain import base_of

aten = torch.ops.aten

_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_NO_OFFSETS = "torch_xla 2.9 reports a storage offset of 0 for every XLA tensor, views included"
_WRITES = (aten.as_strided_scatter.default,)


def resolve_memory_places(graph: fx.Graph, *, writes_to_inputs: bool, on_device: bool) -> None:
    """Edit a graph that AOTAutograd has traced, using the strides of its fake tensors.

    Args:
        graph: Edited in place.
        writes_to_inputs: Whether it writes to an argument in place.
        on_device: Whether its arguments are XLA tensors.

    Raises:
        XLACompilationError: An address is in no tensor of the graph, or the layout of the memory is unknown.
    """
    for node in list(calls(graph, *_READS, *_WRITES)):
        base = base_of(node.args[0])
        written = _input_written(base) if writes_to_inputs else None
        if on_device and _explicit_offset(node) is not None and (written is not None or _is_input(base)):
            raise _refused(node, _NO_OFFSETS)
        order = _order(base.meta["val"])
        if order is None:
            raise _refused(node, "the tensor is not dense, or its strides depend on a size")
        if written is not None and not _has_same_layout(base.meta["val"], written):
            raise _refused(node, "it may be an argument that was written to, whose strides differ")
        if base is not node.args[0] or order != sorted(order) or _offset(base) != 0:
            _resolve(node, base, order)


def refuse_places_of_inputs(graph: fx.Graph) -> None:
    """Refuse `as_strided` of an input with an explicit storage offset, or whose result the graph returns.

    The graph is Dynamo's, whose inputs are XLA tensors. AOTAutograd's graph does not contain a result that is a view of
    an input: torch_xla computes it after the program.

    Raises:
        XLACompilationError: The graph has such a call.
    """
    inputs = {_memory_of(node) for node in graph.find_nodes(op="placeholder")} - {None}
    returned = {_memory_of(node) for node in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if node.target not in ("as_strided", torch.as_strided, torch.Tensor.as_strided):
            continue
        offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        memory = _memory_of(node)
        if memory in inputs and (offset is not None or memory in returned):
            raise _refused(node, _NO_OFFSETS)


def _memory_of(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _resolve(node: fx.Node, base: fx.Node, order: Sequence[int]) -> None:
    x, source = node.args[0], node.args[1 : 1 + (node.target in _WRITES)]
    size, stride = node.args[1 + len(source) :][:2]
    given = _explicit_offset(node)
    offset = _offset(x) if given is None else given
    place = _place(node, base, size, stride, offset)
    with node.graph.inserting_before(node):
        memory = insert_call(node.graph, aten.permute.default, (base, list(order)), {}, like=node)
        new = insert_call(node.graph, node.target, (memory, *source, *place), {}, like=node)
        if source:
            new = _read_back(x, new, base, order)
    replace_node(node, new)


def _explicit_offset(node: fx.Node) -> Any:
    """The explicit storage offset of the call; None without one."""
    given = node.args[3 + (node.target in _WRITES) :]
    return given[0] if given else node.kwargs.get("storage_offset")


def _read_back(x: Any, written: fx.Node, base: fx.Node, order: Sequence[int]) -> fx.Node:
    """`x`, read from memory that was written to."""
    graph = written.graph
    if x is base:
        back = [order.index(d) for d in range(len(order))]
        return insert_call(graph, aten.permute.default, (written, back), {}, like=written)
    value = x.meta["val"]
    sizes = (*value.shape, *value.stride(), _offset(x))
    if not all(isinstance(n, int) for n in sizes):
        raise _refused(written, "it writes to a view of symbolic size")
    place = (list(value.shape), list(value.stride()), _offset(x) - _offset(base))
    return insert_call(graph, aten.as_strided.default, (written, *place), {}, like=written)


def _place(node: fx.Node, base: fx.Node, size: Any, stride: Any, offset: Any) -> tuple[Any, Any, Any]:
    """Sizes, strides and offset relative to the part of the memory that `base` holds."""
    start = _offset(base)
    if start == 0 and not isinstance(offset, int):
        return size, stride, offset
    if not isinstance(start, int) or not isinstance(offset, int):
        raise _refused(node, "its storage offset is symbolic")
    offset -= start
    if math.prod(size):  # comparisons of sizes that vary become guards
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or last >= base.meta["val"].numel():
            raise _refused(node, "the memory begins before the tensor, or ends after it")
    return size, stride, offset


def _is_input(base: fx.Node) -> bool:
    return base.op == "placeholder" and not is_tangent(base)


def _has_same_layout(value: torch.Tensor, argument: torch.Tensor) -> bool:
    has_same_offset = statically_known_true(argument.storage_offset() == 0)
    strides = zip(value.stride(), argument.stride(), strict=True)
    return has_same_offset and all(statically_known_true(a == b) for a, b in strides)


def _input_written(base: fx.Node) -> torch.Tensor | None:
    """The argument whose in-place write may have produced a value; None without one.

    The graph has a new value for each write, so `x.add_(1)` and `x + 1` look alike.
    """
    source = base
    while source.op == "call_function" and source.args and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    value, other = base.meta["val"], source.meta.get("val")
    if source is base or source.op != "placeholder" or not isinstance(other, torch.Tensor):
        return None
    if len(value.shape) != len(other.shape) or value.dtype != other.dtype:
        return None
    sizes = zip(value.shape, other.shape, strict=True)
    return other if all(statically_known_true(a == b) for a, b in sizes) else None


def _refused(node: fx.Node, reason: str) -> XLACompilationError:
    return XLACompilationError(
        f"{node.target}{user_line(node)} addresses the memory of a tensor: {reason}. Allowed: addresses within one "
        "dense tensor. Try: slice the tensor, call as_strided on x.clone(), or x.diagonal().fill_() for fill_diagonal_."
    )


def _offset(node: Any) -> Any:
    return node.meta["val"].storage_offset()


def _order(value: torch.Tensor) -> list[int] | None:
    """The dimensions in memory order, outermost first; None unless the tensor is known to be dense."""
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
