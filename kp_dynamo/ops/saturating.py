"""GELU and tanh that saturate as ATen's do: GELU at x times 0 for very negative x, which is -0 and, for -inf, NaN.

    gelu(x) = x * below(x)      below(x) = 1/2 + erf(x / sqrt(2)) / 2, the normal distribution function

XLA's float32 `erf` saturates three roundings short of -1, so torch_xla 2.9's GELU of -1e30 is -9e22. Its float64 `tanh`
saturates short of -1 too. Both are corrected where the exact value is nearer to the limit than to XLA's.
"""

from __future__ import annotations

import math

import torch

_CUBIC = 0.044715
_FACTOR = math.sqrt(2 / math.pi)
_LEAST = -5.5  # below(x) is 2e-8 there, a third of a float32 rounding at 1
_ONE = 19.1  # tanh is 1 in float64 from here on


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """`aten.gelu` of float32 or float64."""
    return x * _below(x, _curve(x, approximate), approximate)


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """`aten.gelu_backward` of float32 or float64."""
    curve = _curve(x, approximate)
    if approximate == "tanh":
        slope = 0.5 * (1 - curve * curve) * (_FACTOR * (1 + 3 * _CUBIC * (x * x)))
    else:
        slope = (x * x * -0.5).exp() * (_FACTOR / 2)
    return gradient * (_below(x, curve, approximate) + x * slope)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """`aten.tanh`."""
    return torch.where(x.abs() > _ONE, x.sign(), torch.tanh(x)) if x.dtype == torch.float64 else torch.tanh(x)


def _curve(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """2 * below(x) - 1, which goes from -1 to 1."""
    if approximate == "none":
        return torch.erf(x * math.sqrt(0.5))
    return tanh(_FACTOR * (x + _CUBIC * (x * x * x)))


def _below(x: torch.Tensor, curve: torch.Tensor, approximate: str) -> torch.Tensor:
    share = 0.5 * curve + 0.5
    return share.masked_fill(x < _LEAST, 0) if approximate == "none" and x.dtype == torch.float32 else share
