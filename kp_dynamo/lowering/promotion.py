"""Dtypes as ATen promotes them: torch_xla 2.9 computes in others, and reports ATen's.

ATen casts the operands to their common dtype, for which a 0-dim tensor counts less than one with dimensions; XLA's
operators promote to the wider. What is reported then is int8, what is computed int64: a cast to int8 changes nothing
and is dropped, and nothing wraps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils import _pytree as pytree

from kp_dynamo.lowering.hlo_ops import cast

aten = torch.ops.aten

# Their first tensor that is bool is a condition, no operand.
_CONDITIONAL = (aten.where, aten.masked_fill)
# ATen's kernels of these for narrow floats take their second operand in float32 where it has no dimensions.
_IN_FLOAT32 = (aten.mul.Tensor, aten.div.Tensor)


def with_common_dtype(node: fx.Node, args: Any) -> Any:
    """The arguments of an elementwise operator, its 0-dim tensors in the dtype that ATen computes in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return args
    operands = _operands(target, args)
    if len({t.dtype for t in operands}) < 2 or all(t.dim() for t in operands):
        return args
    dtype = _computed_in(node, operands)
    changes = {id(t): t.to(dtype) for t in operands if t.dim() == 0 and dtype not in (None, t.dtype)}
    return pytree.tree_map_only(torch.Tensor, lambda t: changes.get(id(t), t), args)


def _operands(target: torch._ops.OpOverload, args: Any) -> list[torch.Tensor]:
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    if target.overloadpacket in _CONDITIONAL:
        return [t for t in tensors if t.dtype != torch.bool]
    return tensors


def _computed_in(node: fx.Node, operands: list[torch.Tensor]) -> torch.dtype | None:
    """The common dtype; None for an operator that makes floats of integers, which have no common one before."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    dtype, _ = elementwise_dtypes(*operands, type_promotion_kind=kind)
    promised = node.meta.get("val")
    if isinstance(promised, torch.Tensor) and promised.is_floating_point() and not dtype.is_floating_point:
        return None
    first, *_, last = operands
    is_narrow = dtype in (torch.bfloat16, torch.float16) and first.dtype == dtype
    return torch.float32 if is_narrow and not last.dim() and node.target in _IN_FLOAT32 else dtype


def in_reported_dtype(result: Any) -> Any:
    """The same tensors, each that XLA computes in another dtype than torch_xla reports cast to that."""
    return pytree.tree_map_only(torch.Tensor, _in_reported_dtype, result)


def _in_reported_dtype(x: torch.Tensor) -> torch.Tensor:
    expected = _xla_type(x.dtype, x.device)
    return x if _type_of(x) == expected else cast(x, expected)


@functools.cache
def _xla_type(dtype: torch.dtype, device: torch.device) -> str:
    """What XLA calls it on this device."""
    return _type_of(torch.zeros((), dtype=dtype, device=device))


def _type_of(x: torch.Tensor) -> str:
    from kp_dynamo import compat

    # torch_xla 2.9: what the tensor's part of the program returns, which may not be what `x.dtype` says.
    return str(compat.xlac()._xla_op_tensor_shape(x, "")["type"])
