"""The real and the imaginary part of a complex tensor, as a pair."""

from __future__ import annotations

import math

import torch

from kp_dynamo.lowering.hlo_ops import has_sign

Parts = tuple[torch.Tensor, torch.Tensor]


def split(z: torch.Tensor) -> Parts:
    """The parts of a complex number."""
    parts = torch.view_as_real(z)
    return parts[..., 0], parts[..., 1]


def join(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """The complex number of two parts."""
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def with_sign(size: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """|size| with the sign of another number, also of a zero."""
    return torch.where(has_sign(sign), -size.abs(), size.abs())


def times_minus_i(u: torch.Tensor, v: torch.Tensor) -> Parts:
    """-i (u + iv), for f(z) = -i g(iz)."""
    return v, -u


def hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a + ib|, whose squares may overflow or underflow."""
    x, y = a.abs(), b.abs()
    large, small = torch.maximum(x, y), torch.minimum(x, y)
    ratio = torch.where(large == 0, torch.zeros_like(small), small / large)
    return torch.where(x.isinf() | y.isinf(), math.inf, large * (1 + ratio * ratio).sqrt())


def times(one: Parts, other: Parts) -> Parts:
    """C99's product, Annex G: infinite if an operand is, unless the other is zero."""
    (a, b), (c, d) = one, other
    real, imaginary = a * c - b * d, a * d + b * c
    is_infinite = a.isinf() | b.isinf() | c.isinf() | d.isinf()
    a, b, c, d = *_corner(a, b), *_corner(c, d)
    is_lost = real.isnan() & imaginary.isnan() & is_infinite
    real = torch.where(is_lost, math.inf * (a * c - b * d), real)
    return real, torch.where(is_lost, math.inf * (a * d + b * c), imaginary)


def _corner(a: torch.Tensor, b: torch.Tensor) -> Parts:
    """An infinity as the corner of a square of size 1 that it lies beyond; a NaN beside it counts as zero."""
    is_infinite, zero = a.isinf() | b.isinf(), torch.zeros_like(a)
    corner = (torch.where(x.isinf(), with_sign(zero + 1, x), zero) for x in (a, b))
    known = (torch.where(x.isnan(), zero, x) for x in (a, b))
    real, imaginary = (torch.where(is_infinite, far, near) for far, near in zip(corner, known, strict=True))
    return real, imaginary
