"""Memory formats and strides of tensors, as ATen chooses and compares them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.utils import _pytree as pytree

# The dimensions of a tensor of channels last, by their number, innermost first.
_CHANNELS_LAST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """ATen's `suggest_memory_format` of a tensor."""
    order = _CHANNELS_LAST.get(tensor.dim())
    if order is None or not _is_like(tensor, order):
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _is_like(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """`is_channels_last_strides_2d_s4` and `_3d_s5` of c10/core/MemoryFormat.h."""
    least: Any = 0
    steps = tensor.stride()
    if steps[1] == 0:
        return False
    for d in order:
        if tensor.shape[d] == 0 or steps[d] < least or (d == 0 and least == steps[1]):
            return False
        least = steps[d] * tensor.shape[d] if tensor.shape[d] > 1 else steps[d]
    return True


def is_dense_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense with its channels last in memory, and not contiguous.

    `is_contiguous(memory_format=...)` is False for every computed fake tensor of symbolic sizes (torch 2.9).
    """
    order = _CHANNELS_LAST.get(tensor.dim())
    return order is not None and _is_dense_in(tensor, order) and not _is_dense_in(tensor, range(tensor.dim())[::-1])


def _is_dense_in(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the dimensions follow each other in memory without gaps, in `order`, innermost first."""
    expected: Any = 1
    for d in order:
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            return False
        expected = expected * tensor.shape[d]
    return True


def empty_in_format(like: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """An empty tensor of the shape and dtype of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def empty_in_order(like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """An empty tensor of the shape and dtype of `like`, with the dimensions in memory in `order`, outermost first."""
    return torch.empty_permuted(like.shape, list(order), dtype=like.dtype, device=like.device)


@functools.lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(make_contiguous_strides_for(shape))


def has_free_strides(value: Any) -> bool:
    """Whether a contiguous tensor has strides, in dimensions of one element, that a new tensor would not have.

    Only for static sizes, because symbolic ones would add guards.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if value._has_symbolic_sizes_strides or 1 not in value.shape:
        return False
    return value.is_contiguous() and value.stride() != _contiguous_strides(value.shape)


def same_strides(one: Any, other: Any) -> bool:
    """Whether the tensors in two values have the same strides, compared as text."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(_strides_text(a) == _strides_text(b) for a, b in pairs)


def _strides_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    return f"{value.stride()} {value.storage_offset()}"
