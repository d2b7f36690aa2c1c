"""Computes with float64 in place of every narrower floating-point dtype, casts included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from kp_dynamo.ledger.real_inputs import NotComparable

_RAISED = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

# They read the bits of a number, or its distance to the next one.
_READ_BITS = (torch.ops.aten.view.dtype, torch.ops.aten.nextafter.default, torch.ops.aten.nextafter_.default)


def call_in_float64(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with its floating-point operands, results and dtype arguments raised to float64.

    An operand that the operator writes to is not raised: it would be another tensor.

    Raises:
        NotComparable: The operator depends on how numbers are stored.
    """
    if target in _READ_BITS:
        raise NotComparable(f"{target} reads the bits of a number")
    if target is torch.ops.aten._softmax.default or target is torch.ops.aten._log_softmax.default:
        args = (*args[:2], False)  # "half to float"
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return target(*args, **kwargs)
    return raised(target(*raised(args), **raised(dict(kwargs))))


def raised(tree: Any) -> Any:
    """Floating-point tensors as float64, and float64 in place of other floating-point dtypes."""
    return tree_map(_raised, tree)


def _raised(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _RAISED.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _RAISED:
        return value.to(_RAISED[value.dtype])
    return value
