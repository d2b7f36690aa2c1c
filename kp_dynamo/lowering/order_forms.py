"""Operators that sort a tensor. XLA compares bits: a negative NaN, as x86 makes them, is least; -0.0 is below 0.0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.elementwise_forms import number

aten = torch.ops.aten


def _ordered(op: Any) -> Callable[..., Any]:
    """`op` with canonical NaNs and zeros: as in ATen, a NaN is the largest, and all zeros are equal."""

    def form(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_floating_point():
            x = torch.where(x == 0, number(0, x), x)
            x = torch.where(x != x, number(math.nan, x), x)
        return op(x, *args, **kwargs)

    return form


ORDER_FORMS: dict[Any, Callable[..., Any]] = {
    op: _ordered(op) for op in (aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default)
}
