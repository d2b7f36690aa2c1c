"""Roots, logarithms and inverse functions of complex numbers, computed from real functions of their parts.

The formulas are those of W. Kahan, "Branch Cuts for Complex Elementary Functions", 1987.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kp_dynamo.lowering.complex_parts import Parts, times_minus_i, with_sign

_NEARLY_ALL = 1e9  # Above this, 1 is negligible beside the square, which overflows float32 at 1.8e19.


def sqrt(a: torch.Tensor, b: torch.Tensor) -> Parts:
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
    real = torch.where(a == math.inf, math.inf, real)
    imaginary = torch.where(b.isinf() | (a == -math.inf), math.inf, imaginary)
    imaginary = torch.where((a == math.inf) & b.isfinite(), torch.zeros_like(a), imaginary)
    return real, with_sign(imaginary, b)


def rsqrt(a: torch.Tensor, b: torch.Tensor) -> Parts:
    p, q = sqrt(a, b)
    below = p * p + q * q
    real, imaginary = torch.where(below == 0, math.inf, p / below), -q / below
    # An infinite z has a root with one infinite part, whose reciprocal is 0, or with two, whose reciprocal is NaN.
    is_zero, zero = p.isinf() ^ q.isinf(), torch.zeros_like(p)
    real = torch.where(is_zero, with_sign(zero, p), real)
    return real, torch.where(is_zero, with_sign(zero, -q), imaginary)


def log(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """log|z| by log1p, which keeps the digits near 1 that |z| loses."""
    x, y = a.abs(), b.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(large == 0, torch.zeros_like(small), small / large)
    far = large.log() + torch.where(small.isinf(), torch.zeros_like(x), (ratio * ratio).log1p() / 2)
    near = ((large - 1) * (large + 1) + small * small).log1p() / 2
    real = torch.where((large > 0.5) & (large < 2), near, far)
    return torch.where(x.isinf() | y.isinf(), math.inf, real), torch.atan2(b, a)


def log1p(a: torch.Tensor, b: torch.Tensor) -> Parts:
    real, imaginary = log(1 + a, b)
    is_near = torch.maximum(a.abs(), b.abs()) < 0.5
    return torch.where(is_near, (a * (2 + a) + b * b).log1p() / 2, real), imaginary


def atanh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    x = a.abs()
    is_infinite = a.isinf() | b.isinf()
    is_far = is_infinite | (torch.maximum(x, b.abs()) > _NEARLY_ALL)
    below = (1 - x) * (1 - x) + b * b
    # Beside 1, the square of a small b is zero.
    near = torch.where((x == 1) & (b.abs() < 1 / _NEARLY_ALL), (b.abs() / 2).log() / -2, (4 * x / below).log1p() / 4)
    ratio = torch.where(x > b.abs(), b / x, x / b)
    smaller = torch.where(x > b.abs(), 1 / x / (1 + ratio * ratio), ratio / b / (1 + ratio * ratio))
    real = torch.where(is_far, torch.where(is_infinite, torch.zeros_like(x), smaller), near)
    imaginary = torch.atan2(2 * b, (1 - x) * (1 + x) - b * b) / 2
    imaginary = torch.where(is_far & ~b.isnan(), with_sign(torch.full_like(b, math.pi / 2), b), imaginary)
    return torch.where(a == 0, a, with_sign(real, a)), imaginary


def atan(a: torch.Tensor, b: torch.Tensor) -> Parts:
    return times_minus_i(*atanh(-b, a))


def _inf(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, math.inf)


def _at_infinity(
    a: torch.Tensor, b: torch.Tensor, parts: Parts, limit: Callable[[torch.Tensor, torch.Tensor], Parts]
) -> Parts:
    """Where a part is infinite, the limit in the direction of z: an infinite part counts as 1, a finite one as 0."""
    x, y = (torch.where(part.isinf(), part.sign(), part * 0) for part in (a, b))
    is_infinite = a.isinf() | b.isinf()
    real, imaginary = (torch.where(is_infinite, far, near) for far, near in zip(limit(x, y), parts, strict=True))
    return real, imaginary


def asin(a: torch.Tensor, b: torch.Tensor) -> Parts:
    (p, q), (r, s) = sqrt(1 - a, -b), sqrt(1 + a, b)
    real = torch.where(a == 0, a, torch.atan2(a, p * r - q * s))
    return _at_infinity(
        a, b, (real, (p * s - q * r).asinh()), lambda x, y: (torch.atan2(x, y.abs()), with_sign(_inf(b), b))
    )


def acos(a: torch.Tensor, b: torch.Tensor) -> Parts:
    (p, q), (r, s) = sqrt(1 - a, -b), sqrt(1 + a, b)
    real = torch.where(a == 0, math.pi / 2, 2 * torch.atan2(p, r))
    return _at_infinity(
        a, b, (real, (r * q - s * p).asinh()), lambda x, y: (torch.atan2(y.abs(), x), -with_sign(_inf(b), b))
    )


def asinh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    return times_minus_i(*asin(-b, a))


def acosh(a: torch.Tensor, b: torch.Tensor) -> Parts:
    (p, q), (r, s) = sqrt(a - 1, b), sqrt(a + 1, b)
    imaginary = torch.where((a == 0) & b.isnan(), math.pi / 2, 2 * torch.atan2(q, r))
    return _at_infinity(
        a, b, ((p * r + q * s).asinh(), imaginary), lambda x, y: (_inf(a), with_sign(torch.atan2(y.abs(), x), b))
    )
