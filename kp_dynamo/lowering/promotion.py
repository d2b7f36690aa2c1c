"""Promote dtypes as ATen does: torch_xla 2.9 reports ATen's dtypes, but computes in others.

ATen casts the operands to their common dtype, in which a 0-dim tensor counts less than one with dimensions. XLA's
operators promote to the wider dtype, and among equally wide ones to the unsigned. So torch_xla may report int8 but
compute in int64: a cast to int8 is then dropped as a no-op, and nothing wraps. It reports int16 for uint8 with int8,
but computes in uint8. A product with a boolean becomes a `where`, which drops an infinity or a NaN that 0 times it
keeps.
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

# The position of the condition, which is not an operand.
_CONDITIONS = {aten.where: 0, aten.masked_fill: 1}
# For narrow floats, ATen's kernels of these read a 0-dim second operand in float32.
_IN_FLOAT32 = (aten.mul.Tensor, aten.div.Tensor)


def with_common_dtype(node: fx.Node, args: Any) -> Any:
    """The arguments of an elementwise operator, with tensors in the dtype in which ATen computes."""
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
        common = of_numbers = promised  # each operand is cast from its own dtype, not from a common integer dtype
    elif len(dtypes) > 1:
        common, of_numbers = _computed_in(node, list(operands.values()))
    else:
        return args
    changes = {i: converted(t, common if t.dim() else of_numbers) for i, t in operands.items()}
    return tuple(changes.get(i, a) for i, a in enumerate(args))


def _float_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of the result, if it is a floating-point dtype."""
    promised = node.meta.get("val")
    return promised.dtype if isinstance(promised, torch.Tensor) and promised.is_floating_point() else None


def _computed_in(node: fx.Node, operands: list[torch.Tensor]) -> tuple[torch.dtype, torch.dtype]:
    """The common dtype, and the dtype for 0-dim tensors."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    dtype, _ = elementwise_dtypes(*operands, type_promotion_kind=kind)
    first, *_, last = operands
    is_narrow = dtype in (torch.bfloat16, torch.float16) and first.dtype == dtype
    return dtype, torch.float32 if is_narrow and not last.dim() and node.target in _IN_FLOAT32 else dtype


def in_reported_dtype(result: Any) -> Any:
    """The same tensors, cast to the dtype that torch_xla reports if XLA computes them in another one."""
    if isinstance(result, torch.Tensor):
        return _in_reported_dtype(result)
    return pytree.tree_map_only(torch.Tensor, _in_reported_dtype, result)


def _in_reported_dtype(x: torch.Tensor) -> torch.Tensor:
    expected = _xla_type(x.dtype, x.device)
    return x if _type_of(x) == expected else cast(x, expected)


@functools.cache
def _xla_type(dtype: torch.dtype, device: torch.device) -> str:
    """XLA's name of a dtype on this device."""
    return _type_of(torch.zeros((), dtype=dtype, device=device))


def _type_of(x: torch.Tensor) -> str:
    from kp_dynamo.compat import xla

    # torch_xla 2.9: the dtype of the tensor in the program, which may differ from `x.dtype`.
    return str(xla.xlac()._xla_op_tensor_shape(x, "")["type"])
