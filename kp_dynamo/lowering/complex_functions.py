"""Elementary functions of complex numbers, computed from real functions of their parts.

XLA's own suffer from cancellation: with torch_xla 2.9, `sin(1e-6 + 1e-6j)` has twice the right imaginary part, and
`atan` of 0.01 is off by 10%. The formulas of the inverse functions are those of W. Kahan, "Branch Cuts for Complex
Elementary Functions", 1987.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS
from kp_dynamo.lowering.hlo_ops import has_sign
from kp_dynamo.ops.saturating import tanh

aten = torch.ops.aten
_Parts = tuple[torch.Tensor, torch.Tensor]

_LARGE = 20.0  # Above this, the hyperbolic sine and cosine are exp / 2 to the last bit of float32 and float64.
_NEARLY_ALL = 1e9  # Above this, 1 is negligible beside the square, which overflows float32 at 1.8e19.


def _sin(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    """sin(a) cosh(b) + i cos(a) sinh(b)."""
    grown, sign = _grown(b), b.sign()
    real = torch.where(b.abs() > _LARGE, grown(a.sin()), a.sin() * b.cosh())
    imaginary = torch.where(b.abs() > _LARGE, grown(a.cos()) * sign, a.cos() * b.sinh())
    return torch.where(a == 0, a, real), torch.where(b == 0, b, imaginary)


def _grown(b: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiplies by exp(|b|) / 2 in two steps, because the product may be finite if that factor is not."""
    half = (b.abs() / 2).exp()
    return lambda factor: factor * 0.5 * half * half


def _cos(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    """cos(a) cosh(b) - i sin(a) sinh(b)."""
    grown = _grown(b)
    real = torch.where(b.abs() > _LARGE, grown(a.cos()), a.cos() * b.cosh())
    imaginary = -torch.where(b.abs() > _LARGE, grown(a.sin()) * b.sign(), a.sin() * b.sinh())
    return real, torch.where((a == 0) | (b == 0), -a * b.sign(), imaginary)


def _sinh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    return _times_minus_i(*_sin(-b, a))


def _cosh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    return _cos(-b, a)


def _tanh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    """(sinh(a) cosh(a) + i sin(b) cos(b)) / (sinh(a)^2 + cos(b)^2)."""
    near = a.clamp(-_LARGE, _LARGE)
    sinh, turn = near.sinh(), b.sin() * b.cos()
    below = sinh * sinh + b.cos() * b.cos()
    is_far = a.abs() >= _LARGE
    real = torch.where(is_far, a.sign(), sinh * near.cosh() / below)
    imaginary = torch.where(is_far, 4 * turn * (-2 * a.abs()).exp(), turn / below)
    return real, torch.where((b == 0) & ~a.isnan(), b, imaginary)


def _tan(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    return _times_minus_i(*_tanh(-b, a))


def _with_sign(size: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    return torch.where(has_sign(sign), -size.abs(), size.abs())


def _sqrt(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    largest = torch.maximum(a.abs(), b.abs())
    # A power of 4, so that no square overflows or underflows, and scaling is exact.
    is_large, is_small = largest > 1e18, largest < 1e-18
    scale = torch.where(is_large, 2.0**-64, torch.where(is_small, 2.0**64, 1.0)).to(a.dtype)
    back = torch.where(is_large, 2.0**32, torch.where(is_small, 2.0**-32, 1.0)).to(a.dtype)
    x, y = a * scale, b * scale
    half = ((x.abs() + (x * x + y * y).sqrt()) / 2).sqrt()
    other = torch.where(half == 0, y.abs(), y.abs() / (2 * half))
    real, imaginary = torch.where(x < 0, other, half) * back, torch.where(x < 0, half, other) * back
    real = torch.where(b.isinf(), b.abs(), torch.where((a == -math.inf) & ~b.isnan(), torch.zeros_like(a), real))
    imaginary = torch.where(b.isinf() | ((a == -math.inf) & ~b.isnan()), math.inf, imaginary)
    imaginary = torch.where((a == math.inf) & b.isfinite(), torch.zeros_like(a), imaginary)
    return real, _with_sign(imaginary, b)


def _rsqrt(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    p, q = _sqrt(a, b)
    below = p * p + q * q
    return torch.where(below == 0, math.inf, p / below), -q / below


def _log(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    """log|z| by log1p, which keeps the digits near 1 that |z| loses."""
    x, y = a.abs(), b.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(large == 0, torch.zeros_like(small), small / large)
    far = large.log() + torch.where(small.isinf(), torch.zeros_like(x), (ratio * ratio).log1p() / 2)
    near = ((large - 1) * (large + 1) + small * small).log1p() / 2
    return torch.where((large > 0.5) & (large < 2), near, far), torch.atan2(b, a)


def _log1p(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    real, imaginary = _log(1 + a, b)
    is_near = torch.maximum(a.abs(), b.abs()) < 0.5
    return torch.where(is_near, (a * (2 + a) + b * b).log1p() / 2, real), imaginary


def _atanh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    x = a.abs()
    is_far = torch.maximum(x, b.abs()) > _NEARLY_ALL
    below = (1 - x) * (1 - x) + b * b
    near = (4 * x / below).log1p() / 4
    ratio = torch.where(x > b.abs(), b / x, x / b)
    smaller = torch.where(x > b.abs(), 1 / x / (1 + ratio * ratio), ratio / b / (1 + ratio * ratio))
    real = torch.where(is_far, torch.where(x.isinf() | b.isinf(), torch.zeros_like(x), smaller), near)
    imaginary = torch.atan2(2 * b, (1 - x) * (1 + x) - b * b) / 2
    imaginary = torch.where(is_far, _with_sign(torch.full_like(b, math.pi / 2), b), imaginary)
    return _with_sign(real, a), imaginary


def _atan(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    return _times_minus_i(*_atanh(-b, a))


def _asin(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    (p, q), (r, s) = _sqrt(1 - a, -b), _sqrt(1 + a, b)
    return torch.atan2(a, p * r - q * s), (p * s - q * r).asinh()


def _acos(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    (p, q), (r, s) = _sqrt(1 - a, -b), _sqrt(1 + a, b)
    return 2 * torch.atan2(p, r), (r * q - s * p).asinh()


def _asinh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    return _times_minus_i(*_asin(-b, a))


def _acosh(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    (p, q), (r, s) = _sqrt(a - 1, b), _sqrt(a + 1, b)
    return (p * r + q * s).asinh(), 2 * torch.atan2(q, r)


def _exp(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    """exp(a) (cos(b) + i sin(b)) in two steps, because the result may be finite if exp(a) is not."""
    half, turns = (a / 2).exp(), b.isfinite()
    real, imaginary = half * b.cos() * half, half * b.sin() * half
    # C99: without an angle, the limits are 0 and infinity + NaN i.
    real = torch.where(turns | a.isfinite() | a.isnan(), real, torch.maximum(a, torch.zeros_like(a)))
    imaginary = torch.where(turns | (a != -math.inf), imaginary, torch.zeros_like(a))
    return real, torch.where(b == 0, b, imaginary)


def _expm1(a: torch.Tensor, b: torch.Tensor) -> _Parts:
    half = (b / 2).sin()
    imaginary = torch.where(b == 0, b, a.exp() * b.sin())
    return a.expm1() * b.cos() - 2 * half * half, imaginary


def _times_minus_i(u: torch.Tensor, v: torch.Tensor) -> _Parts:
    """-i (u + iv), for f(z) = -i g(iz)."""
    return v, -u


def _of_parts(form: Callable[[torch.Tensor, torch.Tensor], _Parts], op: Any, factor: float = 1.0) -> Any:
    def function(z: torch.Tensor) -> Any:
        if not z.is_complex():
            return op(z)
        parts = torch.view_as_real(z)
        real, imaginary = form(parts[..., 0], parts[..., 1])
        if factor != 1.0:
            real, imaginary = real * factor, imaginary * factor
        return torch.view_as_complex(torch.stack([real, imaginary], -1))

    return function


COMPLEX_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.sin.default: _of_parts(_sin, aten.sin.default),
    aten.cos.default: _of_parts(_cos, aten.cos.default),
    aten.tan.default: _of_parts(_tan, aten.tan.default),
    aten.sinh.default: _of_parts(_sinh, aten.sinh.default),
    aten.cosh.default: _of_parts(_cosh, aten.cosh.default),
    aten.tanh.default: _of_parts(_tanh, tanh),
    aten.asin.default: _of_parts(_asin, aten.asin.default),
    aten.acos.default: _of_parts(_acos, aten.acos.default),
    aten.atan.default: _of_parts(_atan, aten.atan.default),
    aten.asinh.default: _of_parts(_asinh, aten.asinh.default),
    aten.acosh.default: _of_parts(_acosh, aten.acosh.default),
    aten.atanh.default: _of_parts(_atanh, aten.atanh.default),
    aten.sqrt.default: _of_parts(_sqrt, aten.sqrt.default),
    aten.rsqrt.default: _of_parts(_rsqrt, aten.rsqrt.default),
    aten.log.default: _of_parts(_log, aten.log.default),
    aten.log2.default: _of_parts(_log, ELEMENTWISE_FORMS[aten.log2.default], 1 / math.log(2)),
    aten.log10.default: _of_parts(_log, ELEMENTWISE_FORMS[aten.log10.default], 1 / math.log(10)),
    aten.log1p.default: _of_parts(_log1p, aten.log1p.default),
    aten.exp.default: _of_parts(_exp, aten.exp.default),
    aten.expm1.default: _of_parts(_expm1, aten.expm1.default),
}
