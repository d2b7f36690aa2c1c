"""Dtypes as ATen promotes them: torch_xla 2.9 computes in others, and reports ATen's.

ATen casts the operands to their common dtype, for which a 0-dim tensor counts less than one with dimensions; XLA's
operators promote to the wider, and to the unsigned one of equally wide. What is reported then is int8, what is computed
int64: a cast to int8 changes nothing and is dropped, and nothing wraps. uint8 and int8 are reported as int16 and
computed in uint8. A product with a boolean becomes a choice, which drops an infinity or a NaN that 0 times it keeps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils import _pytree as pytree

from kp_dynamo.lowering.cast_forms import converted
from kp_dynamo.lowering.hlo_ops import cast

aten = torch.ops.aten

# The argument of these that is a condition, no operand.
_CONDITIONS = {aten.where: 0, aten.masked_fill: 1}
# ATen's kernels of these for narrow floats take their second operand in float32 where it has no dimensions.
_IN_FLOAT32 = (aten.mul.Tensor, aten.div.Tensor)


def with_common_dtype(node: fx.Node, args: Any) -> Any:
    """The arguments of an elementwise operator, its tensors in the dtype that ATen computes in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return args
    if torch.Tag.pointwise not in target.tags and target is not aten.rsub.Tensor:
        return args
    condition = _CONDITIONS.get(target.overloadpacket)
    operands = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i != condition}
    dtypes = {t.dtype for t in operands.values()}
    if not dtypes:
        return args
    if not any(d.is_floating_point or d.is_complex for d in dtypes) and (promised := _float_of(node)):
        common = of_numbers = promised  # from each operand's own: no common integer dtype comes before
    elif len(dtypes) > 1:
        common, of_numbers = _computed_in(node, list(operands.values()))
    else:
        return args
    changes = {i: converted(t, common if t.dim() else of_numbers) for i, t in operands.items()}
    return tuple(changes.get(i, a) for i, a in enumerate(args))


def _float_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of the result, if that is one of floats."""
    promised = node.meta.get("val")
    return promised.dtype if isinstance(promised, torch.Tensor) and promised.is_floating_point() else None


def _computed_in(node: fx.Node, operands: list[torch.Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """The common dtype, and the one for 0-dim tensors."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    dtype, _ = elementwise_dtypes(*operands, type_promotion_kind=kind)
    first, *_, last = operands
    is_narrow = dtype in (torch.bfloat16, torch.float16) and first.dtype == dtype
    return dtype, torch.float32 if is_narrow and not last.dim() and node.target in _IN_FLOAT32 else dtype


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
    from kp_dynamo.compat import xla

    # torch_xla 2.9: what the tensor's part of the program returns, which may not be what `x.dtype` says.
    return str(xla.xlac()._xla_op_tensor_shape(x, "")["type"])
