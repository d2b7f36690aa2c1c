"""GELU and tanh that end where ATen's do: GELU at x times 0 for very negative x, which is -0 and, for -inf, NaN.

    gelu(x) = x * below(x)      below(x) = 1/2 + erf(x / sqrt(2)) / 2, the share of normal numbers below x

XLA's `erf` of float32 ends three roundings short of -1, where torch_xla 2.9 gives -9e22 of -1e30; its `tanh` of float64
ends short of -1 too. Both are set right from where on the exact value is nearer to the end than they are.
"""

from __future__ import annotations

import math

import torch

_CUBIC = 0.044715
_FACTOR = math.sqrt(2 / math.pi)
_LEAST = -5.5  # the share below it is 2e-8, a third of a rounding of float32 beside 1
_ONE = 19.1  # from where on tanh is 1 in float64


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
    """What goes from -1 to 1."""
    if approximate == "none":
        return torch.erf(x * math.sqrt(0.5))
    return tanh(_FACTOR * (x + _CUBIC * (x * x * x)))


def _below(x: torch.Tensor, curve: torch.Tensor, approximate: str) -> torch.Tensor:
    share = 0.5 * curve + 0.5
    return share.masked_fill(x < _LEAST, 0) if approximate == "none" and x.dtype == torch.float32 else share
