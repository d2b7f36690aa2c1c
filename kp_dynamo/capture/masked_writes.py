"""Writes through a boolean mask, as in `x[mask] = 0` and `x[mask] = self.token`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.capture.insertion import insert_call, value_of

_IN_PLACE = (operator.setitem, "__setitem__", "index_put_", torch.index_put_)
_WRITES = (*_IN_PLACE, "index_put", torch.index_put)
_NAMES = ("input", "indices", "values", "accumulate")


class _Write(NamedTuple):
    """A write of `values` to the elements of `x[basic]` at which the mask is True.

    Attributes:
        x: The tensor.
        basic: Its index, with whole dimensions in the place of the mask.
        mask: The mask.
        after: How many dimensions of `x[basic]` come after those of the mask.
        values: A number, or a tensor.
        shape: The shape in which the tensor broadcasts to `x[basic]`.
        accumulates: Whether the values are added.
    """

    x: fx.Node
    basic: tuple[Any, ...]
    mask: fx.Node
    after: int
    values: Any
    shape: Sequence[Any]
    accumulates: bool


def select_masked_writes(gm: fx.GraphModule) -> None:
    """Replace the writes of values that do not depend on the number of Trues by selects, in place.

        before                                      after
        x[mask] = value                             x.copy_(torch.where(mask, value, x))
        y = x.index_put((mask,), value)             y = x.clone(); y.copy_(torch.where(mask, value, y))

    The operator reads where the mask is True, so that torch_xla runs it on the CPU, and its gradient by the value has
    a size that varies. A value with an element for each True stays: eager checks their number, and a program cannot.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            writes = [node for node in module.graph.nodes if node.target in _WRITES]
            found = {node: write for node in writes if (write := _read(node)) is not None}
            for node, write in found.items():
                _rewrite(node, write)
            if found:
                module.recompile()


def _rewrite(node: fx.Node, write: _Write) -> None:
    with node.graph.inserting_before(node):
        written = write.x if node.target in _IN_PLACE else insert_call(node, "clone", write.x)
        is_whole = all(index == slice(None) for index in write.basic)
        view = written if is_whole else insert_call(node, operator.getitem, written, write.basic)
        _select(node, view, write)
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)


def _select(like: fx.Node, view: fx.Node, write: _Write) -> None:
    mask, values = write.mask, write.values
    if write.after:
        mask = insert_call(like, operator.getitem, mask, (..., *[None] * write.after))
    if isinstance(value_of(values), torch.Tensor):
        values = insert_call(like, "reshape", values, tuple(write.shape))
    else:
        values = insert_call(like, "new_full", view, (), values)
    if write.accumulates:
        values = insert_call(like, torch.add, view, values)
    selected = insert_call(like, torch.where, mask, values, view)
    with torch.no_grad():  # the fake value may be a leaf, which the graph writes without gradients
        insert_call(like, "copy_", view, selected)


def _read(node: fx.Node) -> _Write | None:
    """What a node writes; None if it must stay."""
    given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    x, index, values = (given.get(name) for name in ("input", "indices", "values"))
    if not isinstance(x, fx.Node) or not isinstance(value_of(x), torch.Tensor):
        return None
    items = tuple(index) if isinstance(index, (tuple, list)) else (index,)
    at = next((i for i, item in enumerate(items) if _is_mask(item)), None)
    if at is None:
        return None
    mask = value_of(items[at])
    basic = (*items[:at], *[slice(None)] * mask.dim(), *items[at + 1 :])
    if any(isinstance(item, (bool, fx.Node, list)) for item in basic):
        return None
    view = value_of(x)[fx.map_arg(basic, value_of)]
    after = view.dim() - mask.dim() - _num_dims(items[:at], basic, value_of(x))
    shape = _broadcast_shape(value_of(values), view, mask, after)
    if shape is None:
        return None
    return _Write(x, basic, items[at], after, values, shape, bool(given.get("accumulate", False)))


def _is_mask(item: Any) -> bool:
    value = value_of(item)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() > 0


def _num_dims(items: Sequence[Any], basic: Sequence[Any], x: torch.Tensor) -> int:
    """How many dimensions the first items of a basic index leave."""
    used = sum(isinstance(item, (int, slice)) for item in basic)
    sizes = [x.dim() - used if item is ... else int(item is None or isinstance(item, slice)) for item in items]
    return sum(sizes)


def _broadcast_shape(values: Any, view: torch.Tensor, mask: torch.Tensor, after: int) -> Sequence[Any] | None:
    """The shape in which the values broadcast to the view; None if they depend on the mask, or eager refuses them."""
    first = view.dim() - after - mask.dim()
    # Of sizes that vary, this is a guard: eager refuses a mask of another shape.
    if not all(size == whole for size, whole in zip(mask.shape, view.shape[first:], strict=False)):
        return None
    if not isinstance(values, torch.Tensor):
        return ()
    shape = list(values.shape)
    while len(shape) > first + 1 + after and _is_equal(shape[0], 1):  # as an assignment does
        del shape[0]
    if len(shape) > after:
        place = len(shape) - after - 1
        if not _is_equal(shape[place], 1):
            return None
        shape[place : place + 1] = [1] * mask.dim()
    fits = len(shape) <= view.dim() and all(
        _is_equal(size, 1) or _is_equal(size, whole) for size, whole in zip(shape[::-1], view.shape[::-1], strict=False)
    )
    return shape if fits and values.dtype == view.dtype else None


def _is_equal(size: Any, other: Any) -> bool:
    return bool(statically_known_true(size == other))
