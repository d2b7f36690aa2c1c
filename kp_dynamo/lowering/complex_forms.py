"""Complex numbers: torch_xla 2.9 computes some of their gradients as real ones, and gives views a wrong layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.complex_parts import join, split
from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS

aten = torch.ops.aten


def _tanh_backward(gradient: torch.Tensor, output: torch.Tensor) -> Any:
    if not output.is_complex():
        return ELEMENTWISE_FORMS[aten.tanh_backward.default](gradient, output)
    return gradient * (1 - output * output).conj_physical()


def _sigmoid_backward(gradient: torch.Tensor, output: torch.Tensor) -> Any:
    if not output.is_complex():
        return ELEMENTWISE_FORMS[aten.sigmoid_backward.default](gradient, output)
    return gradient * (output * (1 - output)).conj_physical()


def _complex(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """torch_xla has no lowering for `complex`, `polar` and `angle`."""
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))


def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return _complex(size * angle.cos(), size * angle.sin())


def _angle(z: torch.Tensor) -> torch.Tensor:
    if z.is_complex():
        parts = torch.view_as_real(z)
        return torch.atan2(parts[..., 1], parts[..., 0])
    x = z if z.dtype.is_floating_point else z.to(torch.get_default_dtype())
    return torch.where(x.isnan(), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


def _sub(x: Any, other: Any, *, alpha: Any = 1) -> Any:
    """x + (-other) for a real number: a zero's sign selects a side of a branch cut, and -0 - 0 is -0, -0 + 0 is 0."""
    is_complex = isinstance(x, torch.Tensor) and x.is_complex() and isinstance(other, (int, float))
    return aten.add.Tensor(x, other, alpha=-alpha) if is_complex else aten.sub.Tensor(x, other, alpha=alpha)


def _sub_number(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    is_complex = x.is_complex() and isinstance(other, (int, float))
    return aten.add.Scalar(x, other, -alpha) if is_complex else aten.sub.Scalar(x, other, alpha)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> Any:
    """torch_xla scales the product of a and b, ATen the first factor: an infinite part makes fewer parts NaN."""
    if not x.is_complex():
        return ELEMENTWISE_FORMS[aten.addcmul.default](x, a, b, value=value)
    return x + a * value * b


def _conj_physical(z: torch.Tensor) -> torch.Tensor:
    """torch_xla has no lowering; `conj` itself is a view."""
    real, imaginary = split(z)
    return join(real, -imaginary)


def _view_as_real(z: torch.Tensor) -> torch.Tensor:
    """torch_xla's own layout lacks a dimension, so XLA aborts the process in a matmul or a concatenation."""
    parts = aten.view_as_real.default(z)
    return torch.stack([parts.select(-1, 0), parts.select(-1, 1)], -1)


def _logical(op: Any) -> Callable[..., Any]:
    """torch_xla only checks the real part."""

    def form(*tensors: torch.Tensor) -> Any:
        return op(*(x != 0 if x.is_complex() else x for x in tensors))

    return form


COMPLEX_FORMS: dict[Any, Callable[..., Any]] = {
    aten.complex.default: _complex,
    aten.polar.default: _polar,
    aten.angle.default: _angle,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub_number,
    aten.addcmul.default: _addcmul,
    aten.view_as_real.default: _view_as_real,
    aten._conj_physical.default: _conj_physical,
    aten._neg_view.default: torch.neg,  # the imaginary part of a conjugate
    **{
        op: _logical(op)
        for op in (
            aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
        )
    },
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
}  # fmt: skip
