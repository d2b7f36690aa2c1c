"""What an operator's samples are turned into: floats and integers at the ends of their ranges, other shapes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Change = Callable[[torch.Tensor], torch.Tensor]

SUBNORMAL = "subnormal"
_INT32 = torch.iinfo(torch.int32)


def _placed(value: float) -> Change:
    """Every fifth element becomes `value`, or the only one."""

    def change(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.numel()).reshape(x.shape) * 7 % 5 == (3 if x.numel() > 4 else 0)
        return torch.where(places, torch.tensor(value, dtype=x.dtype), x)

    return change


# Squares of the huge and the tiny are in the range of float32: eager accumulates many of them in float64.
FLOATS: dict[str, Change] = {
    "inf": _placed(float("inf")),
    "-inf": _placed(float("-inf")),
    "nan": _placed(float("nan")),
    "zero": _placed(0.0),
    "huge": lambda x: x * 1e12,
    "tiny": lambda x: x * 1e-12,
    "mean": lambda x: x + 1000,
    SUBNORMAL: _placed(1e-40),
}

# Of int32, so that indices, which are int64, stay in their range.
INTEGERS: dict[str, Change] = {
    "least": _placed(_INT32.min),
    "largest": _placed(_INT32.max),
    "-1": _placed(-1),
    "0": _placed(0),
}

# Of float32: where eager is exact, as sums and products of whole numbers are, nothing may be rounded.
WHOLE: dict[str, Change] = {
    "whole": lambda x: (x * 3).round(),
    "equal": lambda x: torch.full_like(x, 41),
    "multiples": lambda x: (x * 3).round() * 41,
}


def _without(dim: int) -> Change:
    return lambda x: x.narrow(dim, 0, 0).clone() if x.dim() else x


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[0].clone() if x.numel() else x


# Of each: what becomes of the first tensor, and of the others.
SHAPES: dict[str, tuple[Change, Change]] = {
    "no rows": (_without(0), _without(0)),
    "no columns": (_without(-1), _without(-1)),
    "first without rows": (_without(0), torch.clone),
    "scalars": (_scalar, _scalar),
    "first and scalars": (torch.clone, _scalar),
}


def flushed(x: torch.Tensor) -> torch.Tensor:
    """What XLA sees: numbers below the normal range are zero."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x) if x.dtype is torch.float32 else x
