"""Elementwise operators with arguments that cannot be tensors: a true length, a tensor, needs other operators."""

from __future__ import annotations

from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Padded, broadcast
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, elementwise, promoted_dtype, rule


def _true(call: Call, number: object) -> object:
    """A number, or a true length as a tensor of the dtype that it is promoted to."""
    true = call.masks.true_value(number)
    if not isinstance(true, torch.Tensor):
        return true
    return true.to(promoted_dtype(true.dtype, [x.tensor.dtype for x in call.operands()]))


@rule(aten.clamp.default, layouts="...", lengths="min max")
def _clamp(call: Call) -> Any:
    """If a bound is a length, clamp by tensors."""
    x = call.args[0]
    ends = [_true(call, call.named_arg(name, position)) for position, name in enumerate(("min", "max"), start=1)]
    if not any(isinstance(end, torch.Tensor) for end in ends):
        return x.replaced(call.unchanged())
    dtypes = [x.tensor.dtype]
    given = (None if end is None else torch.as_tensor(end) for end in ends)
    least, most = (None if end is None else end.to(promoted_dtype(end.dtype, dtypes)) for end in given)
    result: torch.Tensor = torch.clamp(x.tensor, least, most)
    return x.replaced(result.to(call.like.dtype))


@rule(aten.add.Tensor, aten.sub.Tensor, layouts="...", lengths="other alpha")
def _sum(call: Call) -> Any:
    """If `alpha` is a length, multiply by it explicitly."""
    factor = _true(call, call.kwargs.get("alpha", 1))
    if not isinstance(factor, torch.Tensor):
        return elementwise(call)
    x, y = (value.tensor if isinstance(value, Padded) else call.masks.true_value(value) for value in call.args)
    result = x + y * factor if call.target is aten.add.Tensor else x - y * factor
    return Padded(result.to(call.like.dtype), broadcast([operand.dims for operand in call.operands()]))
