"""Elementary functions of complex numbers, computed from real functions of their parts.

XLA's own suffer from cancellation: with torch_xla 2.9, `sin(1e-6 + 1e-6j)` has twice the right imaginary part, and
`atan` of 0.01 is off by 10%. At infinities, they lack the limits of C99, Annex G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering import complex_inverses as inverses
from kp_dynamo.lowering.complex_parts import Parts, hypot, join, split, times_minus_i
from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS
from kp_dynamo.ops.saturating import tanh

aten = torch.ops.aten

_LARGE = 20.0  # Above this, the hyperbolic sine and cosine are exp / 2 to the last bit of float32 and float64.


def _sin(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """sin(a) cosh(b) + i cos(a) sinh(b)."""
    grown, sign = _grown(b), b.sign()
    real = torch.where(b.abs() > _LARGE, grown(a.sin()), a.sin() * b.cosh())
    imaginary = torch.where(b.abs() > _LARGE, grown(a.cos()) * sign, a.cos() * b.sinh())
    imaginary = torch.where(b.isinf() & ~a.isfinite(), math.inf, imaginary)
    return torch.where(a == 0, a, real), torch.where(b == 0, b, imaginary)


def _grown(b: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiplies by exp(|b|) / 2 in two steps, because the product may be finite if that factor is not."""
    half = (b.abs() / 2).exp()
    return lambda factor: factor * 0.5 * half * half


def _cos(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """cos(a) cosh(b) - i sin(a) sinh(b)."""
    grown = _grown(b)
    real = torch.where(b.abs() > _LARGE, grown(a.cos()), a.cos() * b.cosh())
    imaginary = -torch.where(b.abs() > _LARGE, grown(a.sin()) * b.sign(), a.sin() * b.sinh())
    zero = torch.where(a.isfinite() & b.isfinite(), -a * b.sign(), torch.zeros_like(a))
    real = torch.where(b.isinf() & ~a.isfinite(), math.inf, real)
    return real, torch.where((a == 0) | (b == 0), zero, imaginary)


def _sinh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    return times_minus_i(*_sin(-b, a))


def _cosh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    return _cos(-b, a)


def _tanh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """(sinh(a) cosh(a) + i sin(b) cos(b)) / (sinh(a)^2 + cos(b)^2)."""
    near = a.clamp(-_LARGE, _LARGE)
    sinh, turn = near.sinh(), b.sin() * b.cos()
    below = sinh * sinh + b.cos() * b.cos()
    is_far = (a.abs() >= _LARGE) & (b.isfinite() | a.isinf())
    real = torch.where(is_far, a.sign(), sinh * near.cosh() / below)
    imaginary = torch.where(is_far, 4 * turn * (-2 * a.abs()).exp(), turn / below)
    imaginary = torch.where(a.isinf() & ~b.isfinite(), torch.zeros_like(a), imaginary)
    return torch.where(a == 0, a, real), torch.where(b == 0, b, imaginary)


def _tan(a: torch.Tensor, b: torch.Tensor) -> Parts:
    return times_minus_i(*_tanh(-b, a))


def exp(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """The exponential, in two steps, because the result may be finite if that of the real part is not."""
    half, turns = (a / 2).exp(), b.isfinite()
    real, imaginary = half * b.cos() * half, half * b.sin() * half
    # C99: without an angle, the limits are 0 and infinity + NaN i.
    real = torch.where(turns | a.isfinite() | a.isnan(), real, torch.maximum(a, torch.zeros_like(a)))
    imaginary = torch.where(turns | (a != -math.inf), imaginary, torch.zeros_like(a))
    return real, torch.where(b == 0, b, imaginary)


def _sgn(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """z / |z|, each part by itself: XLA's complex division makes both NaN at an infinity."""
    size = hypot(a, b)
    return torch.where(size == 0, a, a / size), torch.where(size == 0, b, b / size)


def _expm1(a: torch.Tensor, b: torch.Tensor) -> Parts:
    half = (b / 2).sin()
    imaginary = torch.where((b == 0) & (a < math.inf), b, a.exp() * b.sin())
    return a.expm1() * b.cos() - 2 * half * half, imaginary


def _sigmoid(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """1 / (1 + exp(-z)), as ATen. XLA's own logistic function is NaN at inf + inf i, where the limit is 1."""
    real, imaginary = exp(-a, -b)
    real = torch.where(imaginary.isnan(), imaginary, real)  # no limit without an angle: XLA's reciprocal would be 0
    return split(join(1 + real, imaginary).reciprocal())


def _of_parts(form: Callable[[torch.Tensor, torch.Tensor], Parts], op: Any, factor: float = 1.0) -> Any:
    def function(z: torch.Tensor) -> Any:
        if not z.is_complex():
            return op(z)
        real, imaginary = form(*split(z))
        if factor != 1.0:
            real, imaginary = real * factor, imaginary * factor
        return join(real, imaginary)

    return function


def _acosh_of_reals(x: torch.Tensor) -> torch.Tensor:
    """XLA's log(x + sqrt(x^2 - 1)) cancels near 1."""
    if x.dtype not in (torch.float32, torch.float64):
        return aten.acosh.default(x)  # type: ignore[no-any-return]
    above = x - 1
    near = (above + (above * (above + 2)).sqrt()).log1p()
    return torch.where((x >= 1) & (x < 2), near, aten.acosh.default(x))


COMPLEX_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.sin.default: _of_parts(_sin, aten.sin.default),
    aten.cos.default: _of_parts(_cos, aten.cos.default),
    aten.tan.default: _of_parts(_tan, aten.tan.default),
    aten.sinh.default: _of_parts(_sinh, aten.sinh.default),
    aten.cosh.default: _of_parts(_cosh, aten.cosh.default),
    aten.tanh.default: _of_parts(_tanh, tanh),
    aten.asin.default: _of_parts(inverses.asin, aten.asin.default),
    aten.acos.default: _of_parts(inverses.acos, aten.acos.default),
    aten.atan.default: _of_parts(inverses.atan, aten.atan.default),
    aten.asinh.default: _of_parts(inverses.asinh, aten.asinh.default),
    aten.acosh.default: _of_parts(inverses.acosh, _acosh_of_reals),
    aten.atanh.default: _of_parts(inverses.atanh, aten.atanh.default),
    aten.sqrt.default: _of_parts(inverses.sqrt, aten.sqrt.default),
    aten.rsqrt.default: _of_parts(inverses.rsqrt, aten.rsqrt.default),
    aten.log.default: _of_parts(inverses.log, aten.log.default),
    aten.log2.default: _of_parts(inverses.log, ELEMENTWISE_FORMS[aten.log2.default], 1 / math.log(2)),
    aten.log10.default: _of_parts(inverses.log, ELEMENTWISE_FORMS[aten.log10.default], 1 / math.log(10)),
    aten.log1p.default: _of_parts(inverses.log1p, aten.log1p.default),
    aten.exp.default: _of_parts(exp, aten.exp.default),
    aten.expm1.default: _of_parts(_expm1, aten.expm1.default),
    aten.sgn.default: _of_parts(_sgn, aten.sgn.default),
    aten.sigmoid.default: _of_parts(_sigmoid, aten.sigmoid.default),
}
