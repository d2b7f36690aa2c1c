"""Elementwise operators with ATen's results where torch_xla 2.9's are wrong: infinities, NaN, limits of ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import as_held, is_integer, operands, wide
from kp_dynamo.lowering.hidden_constants import hidden, mean
from kp_dynamo.lowering.hlo_ops import has_sign
from kp_dynamo.lowering.integer_forms import integer_power
from kp_dynamo.ops.saturating import gelu, gelu_backward

aten = torch.ops.aten

_INF = math.inf


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """torch_xla replaces a missing bound by the largest finite number. ATen ignores a NaN that is the only bound."""
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)) and None in (low, high):
        return x.clone()
    if not x.dtype.is_floating_point:
        return aten.clamp.default(x, low, high)
    return aten.clamp.default(x, -_INF if low is None else low, _INF if high is None else high)


def _atan2(y: torch.Tensor, x: torch.Tensor) -> Any:
    """XLA divides subnormal numbers as zeros, but compares them as they are: 0 / 0 is NaN."""
    return aten.atan2.default(_without_subnormals(y), _without_subnormals(x))


def _without_subnormals(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, x * 0, x) if x.dtype.is_floating_point else x


def _nan_to_num(x: torch.Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """torch_xla uses the bounds of float32 for bfloat16."""
    if not x.dtype.is_floating_point:
        return x.clone()
    bound = torch.finfo(x.dtype).max
    high, low = bound if posinf is None else posinf, -bound if neginf is None else neginf
    x = torch.where(x == _INF, number(high, x), torch.where(x == -_INF, number(low, x), x))
    return torch.where(x.isnan(), number(nan or 0.0, x), x)


def _pow(x: torch.Tensor, exponent: Any) -> Any:
    """ATen uses the square root, which is NaN for -inf, except for float16. A power of -inf would be inf."""
    if x.dtype.is_floating_point and x.dtype != torch.float16 and abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else x.rsqrt()
    if is_integer(x.dtype) and isinstance(exponent, int) and exponent > 63:
        return integer_power(x, exponent)
    return aten.pow.Tensor_Scalar(x, exponent)


def _copysign(x: torch.Tensor, sign: Any) -> Any:
    """torch_xla turns a constant -0.0 into 0.0, and has no copysign of two tensors."""
    if not isinstance(sign, torch.Tensor):
        if not x.dtype.is_floating_point:
            return aten.copysign.Scalar(x, sign)
        return -x.abs() if math.copysign(1, sign) < 0 else x.abs()
    dtype = torch.result_type(x, sign)
    size = x.to(dtype if dtype.is_floating_point else torch.get_default_dtype()).abs()
    return torch.where(signbit(sign), -size, size)


def signbit(x: torch.Tensor) -> torch.Tensor:
    """`aten.signbit`."""
    return has_sign(x) if x.dtype.is_floating_point else x < 0


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> Any:
    """Interpolate from the nearer end, as ATen: torch_xla starts from the first end, and computes inf - inf."""
    dtype = torch.result_type(x, weight) if isinstance(weight, torch.Tensor) else x.dtype
    x, end = wide(x.to(dtype)), wide(end.to(dtype))
    way = end - x
    if not isinstance(weight, torch.Tensor):
        return (x + weight * way if abs(weight) < 0.5 else end - way * (1 - weight)).to(dtype)
    weight = weight.to(x.dtype)
    return torch.where(weight.abs() < 0.5, x + weight * way, end - way * (1 - weight)).to(dtype)


def _log_sigmoid(x: torch.Tensor) -> Any:
    """log(sigmoid(x)) and exp(-|x|). torch_xla adds inf and -inf."""
    values = wide(x)
    z = (-values.abs()).exp()
    return (_clamp(values, None, 0.0) - z.log1p()).to(x.dtype), z.to(x.dtype)


def _log_sigmoid_backward(gradient: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> Any:
    return (wide(gradient) * (-wide(x)).sigmoid()).to(x.dtype)


def _cross_entropy_with_logits(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, positive: Any = None, reduction: int = 1
) -> Any:
    """Use the logarithm of the sigmoid, as ATen: torch_xla adds inf and -inf."""
    of_log = 1 if positive is None else (positive - 1) * target + 1
    loss = (1 - target) * x - of_log * _log_sigmoid(x)[0]
    loss = loss if weight is None else loss * weight
    return mean(loss, range(loss.dim())) if reduction == 1 else loss.sum() if reduction == 2 else loss


def _remainder(x: Any, y: Any) -> Any:
    """torch_xla subtracts floor(x / y) * y: NaN if y is infinite, and wrong if the quotient is rounded up."""
    x, y, dtype = operands(x, y)
    if not dtype.is_floating_point:
        return aten.remainder.Tensor(x, y)
    x, y = wide(x), wide(y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest).to(dtype)


def _div_mode(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """The floor of a quotient that was rounded up to an integer is too large by one: 1 // 0.1 is 9."""
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    is_number = not isinstance(y, torch.Tensor)
    y_numel = 1 if is_number else y.numel()
    x, y, dtype = _divided(x, y)
    if not dtype.is_floating_point:
        return aten.div.Tensor_mode(x, y, rounding_mode=rounding_mode)
    quotient = x / (hidden(y, x) if is_number else y)
    if rounding_mode is None:
        return quotient.to(dtype)
    # ATen rounds a quotient of tensors before it truncates: 1.5 / 0.3 is 5 in float16. It does not if y is one number.
    return (quotient if y_numel == 1 else quotient.to(dtype)).trunc().to(dtype)


def _floor_divide(x: Any, y: Any) -> Any:
    """As in ATen and Python: subtract the remainder, so that the division is exact."""
    x, y, dtype = _divided(x, y)
    if not dtype.is_floating_point:
        return aten.floor_divide.default(x, y)
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    exact = torch.where((rest != 0) & ((y < 0) != (rest < 0)), exact - 1, exact)
    whole = exact.floor()
    whole = torch.where(exact - whole > 0.5, whole + 1, whole)
    whole = torch.where(exact == 0, (x / y) * 0, whole)
    return torch.where(y == 0, x / y, whole).to(dtype)


def _divided(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """The operands upcast to at least float32, as ATen divides them, and the dtype of the result.

    A divisor that is a number is not rounded to a narrow dtype first.
    """
    first, second, dtype = operands(x, y)
    if isinstance(y, torch.Tensor) or not dtype.is_floating_point:
        return wide(first), wide(second), dtype
    return wide(first), number(y, wide(first)), dtype


def _in_float32(op: Any) -> Callable[..., torch.Tensor]:
    """`op` in float32, rounded once. Otherwise its numbers and each of its XLA operators round to a narrow dtype."""

    def form(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wider = [wide(a) if isinstance(a, torch.Tensor) else a for a in (x, *args)]
        return op(*wider, **kwargs).to(x.dtype)

    return form


def number(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number in the dtype of a tensor."""
    return torch.full((), as_held(value, like.dtype), dtype=like.dtype, device=like.device)


def _logarithm(op: Any, base: float) -> Callable[..., torch.Tensor]:
    """An exact integer for powers of the base: XLA multiplies the natural logarithm by a rounded constant."""

    def form(x: torch.Tensor) -> Any:
        if is_integer(x.dtype) or x.dtype == torch.bool:
            x = x.to(torch.get_default_dtype())
        found = op(wide(x))
        whole = found.round()
        return torch.where(aten.pow.Scalar(base, whole) == wide(x), whole, found).to(x.dtype)

    return form


def _erf(x: torch.Tensor) -> Any:
    """erf is 1 in float32 from 4 on, but XLA's saturates three roundings short of it."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return aten.erf.default(x)
    values = wide(x)
    return torch.where(values.abs() >= 4, values.sign(), aten.erf.default(values)).to(x.dtype)


def _isnan(x: torch.Tensor) -> torch.Tensor:
    """XLA's isnan does not support integers, booleans and complex numbers."""
    if x.is_complex():
        return torch.view_as_real(x).isnan().any(-1)
    return aten.isnan.default(x) if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def _arange(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, device: Any, **kwargs: Any
) -> Any:
    """start + i * step in float64, as ATen computes floats; torch_xla adds up the steps."""
    is_whole = all(isinstance(number, int) for number in (start, end, step))
    dtype = dtype or (torch.int64 if is_whole else torch.get_default_dtype())
    if is_whole or not dtype.is_floating_point:
        return aten.arange.start_step(start, end, step, dtype=dtype, device=device)
    count = math.ceil((end - start) / step)
    return (aten.arange.default(count, dtype=torch.float64, device=device) * step + start).to(dtype)


ELEMENTWISE_FORMS: dict[Any, Callable[..., Any]] = {
    aten.arange.start_step: _arange,
    aten.isnan.default: _isnan,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda x, low: _clamp(x, low, _INF if x.is_floating_point() else None),
    aten.clamp_max.default: lambda x, high: _clamp(x, -_INF if x.is_floating_point() else None, high),
    aten.nan_to_num.default: _nan_to_num,
    aten.pow.Tensor_Scalar: _pow,
    aten.copysign.Scalar: _copysign,
    aten.copysign.Tensor: _copysign,
    aten.signbit.default: signbit,
    aten.log2.default: _logarithm(aten.log2.default, 2.0),
    aten.log10.default: _logarithm(aten.log10.default, 10.0),
    aten.erf.default: _erf,
    aten.atan2.default: _atan2,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten.binary_cross_entropy_with_logits.default: _cross_entropy_with_logits,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.gelu.default: _in_float32(gelu),
    aten.gelu_backward.default: _in_float32(gelu_backward),
    **{
        op: _in_float32(op)
        for op in (
            aten.mish.default, aten.mish_backward.default, aten.silu_backward.default, aten.glu.default,
            aten.leaky_relu.default, aten.leaky_relu_backward.default, aten.rrelu_with_noise_backward.default,
            aten.tanh_backward.default, aten.sigmoid_backward.default, aten.addcmul.default, aten.addcdiv.default,
        )
    },
}  # fmt: skip
