"""Elementwise operators that torch_xla 2.9 gets wrong at infinities, NaN or the ends of their ranges, as ATen's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import is_integer, operands
from kp_dynamo.lowering.integer_forms import integer_power
from kp_dynamo.saturating import gelu, gelu_backward, tanh

aten = torch.ops.aten

_INF = math.inf


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """torch_xla takes the largest finite number for a bound that is not given."""
    if not x.dtype.is_floating_point:
        return aten.clamp.default(x, low, high)
    return aten.clamp.default(x, -_INF if low is None else low, _INF if high is None else high)


def _nan_to_num(x: torch.Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """torch_xla takes the bounds of float32 for bfloat16."""
    if not x.dtype.is_floating_point:
        return x.clone()
    bound = torch.finfo(x.dtype).max
    high, low = bound if posinf is None else posinf, -bound if neginf is None else neginf
    x = torch.where(x == _INF, number(high, x), torch.where(x == -_INF, number(low, x), x))
    return torch.where(x.isnan(), number(nan or 0.0, x), x)


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    """ATen takes the square root, which is NaN for -inf; a power is inf, and ATen's of float16."""
    if x.dtype.is_floating_point and x.dtype != torch.float16 and abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else x.rsqrt()
    if is_integer(x.dtype) and isinstance(exponent, int) and exponent > 63:
        return integer_power(x, exponent)
    return aten.pow.Tensor_Scalar(x, exponent)


def _copysign(x: torch.Tensor, sign: Any) -> Any:
    """A constant -0.0 becomes 0.0 in torch_xla."""
    if not x.dtype.is_floating_point:
        return aten.copysign.Scalar(x, sign)
    return -x.abs() if math.copysign(1, sign) < 0 else x.abs()


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    """From the nearer end, as ATen: torch_xla goes from the first, by inf - inf."""
    dtype = torch.result_type(x, weight) if isinstance(weight, torch.Tensor) else x.dtype
    x, end = wide(x.to(dtype)), wide(end.to(dtype))
    way = end - x
    if not isinstance(weight, torch.Tensor):
        return (x + weight * way if abs(weight) < 0.5 else end - way * (1 - weight)).to(dtype)
    weight = weight.to(x.dtype)
    return torch.where(weight.abs() < 0.5, x + weight * way, end - way * (1 - weight)).to(dtype)


def _log_sigmoid(x: torch.Tensor) -> Any:
    """log(sigmoid(x)) and exp(-|x|); torch_xla adds inf and -inf."""
    values = wide(x)
    z = (-values.abs()).exp()
    return (_clamp(values, None, 0.0) - z.log1p()).to(x.dtype), z.to(x.dtype)


def _log_sigmoid_backward(gradient: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> Any:
    return (wide(gradient) * (-wide(x)).sigmoid()).to(x.dtype)


def _cross_entropy_with_logits(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, positive: Any = None, reduction: int = 1
) -> Any:
    """By the logarithm of the sigmoid, as ATen: torch_xla adds inf and -inf."""
    of_log = 1 if positive is None else (positive - 1) * target + 1
    loss = (1 - target) * x - of_log * _log_sigmoid(x)[0]
    loss = loss if weight is None else loss * weight
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def _threshold(x: torch.Tensor, threshold: Any, value: Any) -> Any:
    """A NaN is above each threshold."""
    return torch.where(x <= threshold, number(value, x), x)


def _threshold_backward(gradient: torch.Tensor, x: torch.Tensor, threshold: Any) -> Any:
    return torch.where(x <= threshold, number(0, gradient), gradient)


def _hardtanh_backward(gradient: torch.Tensor, x: torch.Tensor, low: Any, high: Any) -> Any:
    """The ends have no gradient: relu6 of 0."""
    return torch.where((x > low) & (x < high), gradient, number(0, gradient))


def _hardsigmoid_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.where((x > -3) & (x < 3), gradient * (1 / 6), number(0, gradient))


def _hardswish_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    """For x between -3 and 3, x / 3 + 1 / 2."""
    inside = (wide(gradient) * (wide(x) / 3 + 0.5)).to(gradient.dtype)
    return torch.where(x <= -3, number(0, gradient), torch.where(x >= 3, gradient, inside))


def _hardshrink_backward(gradient: torch.Tensor, x: torch.Tensor, threshold: Any) -> Any:
    return torch.where((x < -threshold) | (x > threshold), gradient, number(0, gradient))


def _smooth_l1_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Any:
    """torch_xla takes the gradient of a NaN for that of a large negative difference."""
    gradient = gradient / x.numel() if reduction == 1 else gradient
    difference = x - target
    near = gradient * (difference if beta == 0 else difference / beta)
    return torch.where(difference <= -beta, -gradient, torch.where(difference >= beta, gradient, near))


def _remainder(x: Any, y: Any) -> Any:
    """torch_xla subtracts floor(x / y) * y: NaN where y is infinite, and off where the quotient is rounded up."""
    x, y, dtype = operands(x, y)
    if not dtype.is_floating_point:
        return aten.remainder.Tensor(x, y)
    x, y = wide(x), wide(y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest).to(dtype)


def _div_mode(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """The floor of a quotient that was rounded up to a whole number is one too many: 1 // 0.1 is 9."""
    both = operands(x, y)
    if rounding_mode != "floor" or not both[2].is_floating_point:
        return aten.div.Tensor_mode(both[0], both[1], rounding_mode=rounding_mode)
    return _floor_divide(x, y)


def _floor_divide(x: Any, y: Any) -> Any:
    """As ATen and Python: of what is left without the remainder, which is divided exactly."""
    x, y, dtype = operands(x, y)
    if not dtype.is_floating_point:
        return aten.floor_divide.default(x, y)
    x, y = wide(x), wide(y)
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    exact = torch.where((rest != 0) & ((y < 0) != (rest < 0)), exact - 1, exact)
    whole = exact.floor()
    whole = torch.where(exact - whole > 0.5, whole + 1, whole)
    whole = torch.where(exact == 0, (x / y) * 0, whole)
    return torch.where(y == 0, x / y, whole).to(dtype)


def _in_float32(op: Any) -> Callable[..., torch.Tensor]:
    """Rounded once: of several XLA operators, each would round to bfloat16 or float16."""

    def form(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wider = [wide(a) if isinstance(a, torch.Tensor) else a for a in (x, *args)]
        return op(*wider, **kwargs).to(x.dtype)

    return form


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that ATen computes in: float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def number(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number in the dtype of a tensor."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _isnan(x: torch.Tensor) -> torch.Tensor:
    """torch_xla asks XLA, which does not take integers and booleans."""
    is_float = x.dtype.is_floating_point or x.is_complex()
    return aten.isnan.default(x) if is_float else torch.zeros_like(x, dtype=torch.bool)


ELEMENTWISE_FORMS: dict[Any, Callable[..., Any]] = {
    aten.isnan.default: _isnan,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, low: _clamp(x, low),
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.nan_to_num.default: _nan_to_num,
    aten.pow.Tensor_Scalar: _pow,
    aten.copysign.Scalar: _copysign,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten.binary_cross_entropy_with_logits.default: _cross_entropy_with_logits,
    aten.threshold.default: _threshold,
    aten.threshold_backward.default: _threshold_backward,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.hardshrink_backward.default: _hardshrink_backward,
    aten.smooth_l1_loss_backward.default: _smooth_l1_backward,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.tanh.default: tanh,
    aten.gelu.default: _in_float32(gelu),
    aten.gelu_backward.default: _in_float32(gelu_backward),
    **{
        op: _in_float32(op)
        for op in (
            aten.mish.default, aten.mish_backward.default,
            aten.softplus.default, aten.softplus_backward.default, aten.silu_backward.default, aten.addcmul.default,
            aten.addcdiv.default,
        )
    },
}  # fmt: skip
