"""Tensors created from sizes. Where a size is also a value of the tensor, the value is the true size."""

from __future__ import annotations

import torch

from kp_dynamo.passes.padding.atoms import Padded, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, rule


@rule(
    aten.zeros.default, aten.ones.default, aten.empty.memory_format, aten.rand.default, aten.randn.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default, aten.empty_permuted.default, torch.ops.kp.dropout_mask.default,
    layouts="...", lengths="stride",
)  # fmt: skip
def _of_size(call: Call) -> Padded:
    return Padded(call.unchanged(), plain(call.like.shape))


@rule(aten.randint.default, aten.randint.low)
def _randint(call: Call) -> Padded:
    return Padded(call.unchanged(), plain(call.like.shape))


@rule(aten.full.default, aten.new_full.default, layouts="...", lengths="fill_value")
def _full(call: Call) -> Padded:
    size, value = call.args[-2:]
    dims = plain(call.like.shape)
    true = torch.as_tensor(call.masks.true_value(value))
    return Padded(true.to(call.like.dtype).expand(size), dims)  # all elements are equal, so any layout is correct


@rule(aten.full_like.default, layouts="...", lengths="fill_value")
def _full_like(call: Call) -> Padded:
    x, value = call.args
    true = torch.as_tensor(call.masks.true_value(value))
    return Padded(true.to(call.like.dtype).expand(x.shape), x.dims)


@rule(aten.scalar_tensor.default, lengths="s")
def _scalar_tensor(call: Call) -> Padded:
    value = torch.as_tensor(call.masks.true_value(call.args[0]))
    return Padded(value.to(call.like.dtype), ())


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step, lengths="start end step")
def _arange(call: Call) -> Padded:
    start = call.args[0] if len(call.args) > 1 else 0
    step = call.arg(2, 1)
    positions = call.masks.positions(call.like.shape[0])
    if call.like.dtype.is_floating_point:
        positions = positions.to(torch.float64)
    numbers = positions * call.masks.true_value(step) + call.masks.true_value(start)
    return Padded(numbers.to(call.like.dtype), plain(call.like.shape))


@rule(aten.eye.default, aten.eye.m)
def _eye(call: Call) -> Padded:
    return Padded(call.unchanged(), plain(call.like.shape))
