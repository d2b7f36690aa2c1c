"""Causal masks that the readers in a divided graph build for themselves, in place of one that all layers read.

A model builds its mask once. In a graph that is divided it would be a value like any other: the passes could not see
what it is, and each layer would read it from memory. A mask that depends on no input is computed here. If it is causal,
each operator that reads it gets `ones(S, T).tril()` instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import fx

from kp_dynamo.blocks.constant_values import computed, independent
from kp_dynamo.blocks.copies import copied
from kp_dynamo.capture.capture import Capture
from kp_dynamo.graph.nodes import called_name

_MAX_ELEMENTS = 1 << 26  # a mask of 8192 x 8192
# They read their operands whatever the strides are, unlike a view.
_READERS = ("scaled_dot_product_attention", "add", "iadd", "masked_fill", "masked_fill_", "where")


def with_own_masks(capture: Capture) -> Capture:
    """`capture` with a copy of its graph, whose readers of causal masks build them; itself if it has none."""
    masks = _causal_masks(capture.gm)
    if not masks:
        return capture
    gm = copied(capture.gm)
    new = dict(zip(capture.gm.graph.nodes, gm.graph.nodes, strict=True))
    for mask, fill in masks.items():
        for reader in filter(_reads_in_any_layout, list(new[mask].users)):
            reader.replace_input_with(new[mask], _built_before(reader, mask.meta["example_value"], fill))
        for unused in _unused(new[mask]):
            gm.graph.erase_node(unused)
    return replace(capture, gm=gm)


def _causal_masks(gm: fx.GraphModule) -> dict[fx.Node, float | None]:
    """The causal masks that depend on no input, with what they have for later keys: a number, None for False."""
    constant = independent(gm)
    candidates = [node for node in constant if _may_be_mask(node) and any(map(_reads_in_any_layout, node.users))]
    if not candidates:
        return {}
    values = computed(constant)
    found = {node: values[node] for node in candidates if node in values}
    found = {node: _without_equal_matrices(value) for node, value in found.items()}
    return {node: _fill_of(mask) for node, mask in found.items() if _is_causal(mask)}


def _without_equal_matrices(value: torch.Tensor) -> torch.Tensor:
    """A view of a tensor [..., S, T] with one of the matrices that are equal because it was expanded."""
    return value[tuple(slice(0, 1 if stride == 0 else None) for stride in value.stride()[:-2])]


def _may_be_mask(node: fx.Node) -> bool:
    """A tensor [..., S, T] of bools or floating point numbers, to which nothing is written."""
    value = node.meta.get("example_value")
    if not _is_plain(value) or value.dim() < 2 or value.requires_grad or value._version:
        return False
    is_mask = value.dtype is torch.bool or value.dtype.is_floating_point
    has_size = value.numel() > 0 and min(value.shape[-2:]) > 1 and value.shape[-2:].numel() <= _MAX_ELEMENTS
    return is_mask and has_size


def _reads_in_any_layout(reader: fx.Node) -> bool:
    return _is_plain(reader.meta.get("example_value")) and called_name(reader) in _READERS


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor, and not one inside of a transform of torch.func."""
    return isinstance(value, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _fill_of(mask: torch.Tensor) -> float | None:
    """What a causal mask has for later keys; None for False. They include the last key of the first query."""
    return None if mask.dtype is torch.bool else float(mask[..., 0, -1].flatten()[0])


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask is True or 0.0 for the keys up to each query, and False or one number for all others."""
    fill = _fill_of(mask)
    built = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if fill is not None:
        built = torch.zeros(mask.shape[-2:], dtype=mask.dtype).masked_fill(~built, fill)
    has_signs = fill is not None and not torch.equal(mask.signbit(), built.signbit().expand_as(mask))  # 0.0 == -0.0
    return fill != 0 and not has_signs and bool((mask == built).all())


def _built_before(reader: fx.Node, like: torch.Tensor, fill: float | None) -> fx.Node:
    """The nodes that build a causal mask, in front of its reader; returns the last. AOTAutograd traces on the CPU."""
    mode = like.fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad(), reader.graph.inserting_before(reader):
        size = tuple(like.shape[-2:])
        kept = _call(reader, torch.tril, _call(reader, torch.ones, size, dtype=torch.bool, device="cpu"))
        if fill is not None:
            zeros = _call(reader, torch.zeros, size, dtype=like.dtype, device="cpu")
            kept = _call(reader, torch.masked_fill, zeros, _call(reader, torch.logical_not, kept), fill)
        return _call(reader, torch.broadcast_to, kept, _size_for(reader, like))


def _size_for(reader: fx.Node, mask: torch.Tensor) -> tuple[int, ...]:
    """One matrix for the whole batch if another operand has the batch of the result, else the mask's own size.

    The passes compute a mask to see what it is, which no batch may make too large.
    """
    operands = [operand.meta.get("example_value") for operand in reader.all_input_nodes]
    batch = reader.meta["example_value"].shape[:-2]
    has_batch = any(isinstance(o, torch.Tensor) and o is not mask and o.shape[:-2] == batch for o in operands)
    return (*([1] * (mask.dim() - 2) if has_batch else mask.shape[:-2]), *mask.shape[-2:])


def _call(reader: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = reader.graph.call_function(target, args, kwargs)
    given, named = fx.map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
    node.meta = {**reader.meta, "example_value": target(*given, **named)}
    return node


def _unused(node: fx.Node) -> Iterator[fx.Node]:
    """A node that nothing reads any more, and then what only it has read; the caller erases each at once."""
    value = node.meta.get("example_value")
    if node.users or node.op not in ("call_function", "call_method") or not _is_plain(value) or value._version:
        return
    sources = node.all_input_nodes
    yield node
    for source in sources:
        yield from _unused(source)
