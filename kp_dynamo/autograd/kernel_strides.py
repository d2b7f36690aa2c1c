"""Rules for the strides of eager's CPU kernels: each gives an empty tensor with the strides of a kernel's result.

A rule takes the arguments of the operator and its fake result, whose strides differ (torch 2.9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm

from kp_dynamo.autograd.memory_formats import (
    empty_in_format,
    empty_in_order,
    is_dense_channels_last,
    suggested_format,
)

aten = torch.ops.aten


def contiguous(_: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Kernels that write to an empty contiguous tensor, whatever the operand's strides."""
    return empty_in_format(result, torch.contiguous_format)


def dense(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Channels last if the operand is dense and channels last, else contiguous."""
    if not is_dense_channels_last(args[0]):
        return contiguous(args, result)
    return empty_in_format(result, torch.channels_last if result.dim() == 4 else torch.channels_last_3d)


def suggested(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Channels last if the operand is, else contiguous."""
    return empty_in_format(result, suggested_format(args[0]))


def rolled(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """One concatenation per dimension: channels last if both parts are; an empty part is contiguous."""
    x: torch.Tensor = args[0]
    shifts, dims = args[1], args[2] if len(args) > 2 else []
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return x.clone()
    is_whole = any(
        isinstance(x.shape[d], int) and shift % x.shape[d] == 0 for shift, d in zip(shifts, dims, strict=False)
    )
    return suggested(args, result) if dims and not is_whole else contiguous(args, result)


def joined(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """`cat_compute_output_memory_format` (TensorShape.h), which also reads strides of dimensions of one element."""
    formats = {suggested_format(part) for part in args[0]}
    return empty_in_format(result, formats.pop() if len(formats) == 1 else torch.contiguous_format)


def stacked(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """After the last dimension, a concatenation of unsqueezed parts; else a view of one of the parts."""
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    if dim in (-1, parts[0].dim()):
        return joined(([part.unsqueeze(-1) for part in parts],), result)
    return joined((parts,), result.flatten(dim, dim + 1) if parts[0].dim() else result).view(result.shape)


def angle(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """The angle of complex numbers is written to an empty tensor."""
    return contiguous(args, result) if args[0].is_complex() else result


def as_the_first(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Kernels that write to `empty_like` of their first operand; a decomposition also reads the others."""
    return torch.empty_like(args[0]) if result.dim() == args[0].dim() else result


def columns(_: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Column-major matrices, as from LAPACK."""
    *batch, rows, columns = range(result.dim())
    return empty_in_order(result, [*batch, columns, rows])


def elementwise(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Like the sum of the operands: torch's references return a contiguous result if one operand is 0-dim."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0]
    if not tensors:
        return result
    total = tensors[0] + 0 if len(tensors) == 1 else torch.add(*tensors[:2])
    return total.to(result.dtype)


def with_number(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Like with a 0-dim tensor: eager's kernel orders dimensions of one element by their strides.

    Fake tensors make the result of a contiguous operand and a number contiguous.
    """
    tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
    if len(tensors) != 1 or not tensors[0].dim():
        return result
    return (tensors[0] + torch.zeros((), dtype=tensors[0].dtype)).to(result.dtype)


def of_a_clone(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Scatters into an expanded tensor: eager clones the full tensor, the decomposition keeps strides of 0."""
    return args[0].clone() if any(_is_zero(step) for step in args[0].stride()) else result


def indexed(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Ordered by the strides of operand and indices together; fake tensors only use the operand."""
    x, given = args[0], list(args[1])
    at = [d for d, index in enumerate(given) if index is not None]
    indices = [given[d] for d in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return result  # the shape depends on how many elements are true
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    is_together = at[-1] - at[0] == len(at) - 1
    first = at[0] if is_together else 0
    rest = x
    for d in reversed(at):
        rest = rest.select(d, 0)
    for _ in shape:
        rest = rest.unsqueeze(first)
    trailing = (None,) * (result.dim() - first - len(shape))
    whole = [index.expand(shape)[(*(None,) * first, ..., *trailing)] for index in indices]
    order = compute_elementwise_output_logical_to_physical_perm(*(t.expand(result.shape) for t in (rest, *whole)))
    return empty_in_order(result, order)


def convolved(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Eager runs a 1-d convolution as a 2-d one whose first dimension has one element (Convolution.cpp).

    Fake tensors ignore the memory format that results from that.
    """
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    if weight.dim() != 3:
        return result
    image, kernel = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    memory_format = torch.contiguous_format
    if {suggested_format(image), suggested_format(kernel)} != {memory_format}:
        geometry = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups
        backend = torch._C._select_conv_backend(image, kernel, None, *geometry)
        memory_format = torch._C._conv_determine_backend_memory_format(image, kernel, backend)
    return empty_in_format(result.unsqueeze(2), memory_format).squeeze(2)


def _is_zero(step: Any) -> bool:
    return isinstance(step, int) and step == 0
