"""Random operators of a program, and their results in another run put in their place.

The masks of dropout are read off its results: zeros are what was dropped. Of a result that was zero before nobody can
tell, and its gradient may hang on it: such a program says nothing (`UnknownMask`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

Kept = tuple[int, int, float]
# Below float32's normal range, XLA has zeros.
_LEAST = 1e-30
# What is 0 in float32 may be a rounding error in float64: a group norm of one element.
_NOTHING = 1e-6
# Deviations: a sum of independent draws is off by so many once in 1e9.
_DEVIATIONS = 6.0


class UnknownMask(Exception):
    """Zeros are dropped or kept, and gradients tell which."""


def odd_shares(kept: Sequence[Kept]) -> str | None:
    """What is wrong with how much dropout kept, over all of a program's."""
    if any(k != n for k, n, share in kept if share == 1.0):
        return "dropout of nothing dropped something, or rand left [0, 1)"
    variance = sum(n * share * (1 - share) for _, n, share in kept)
    off = sum(k - n * share for k, n, share in kept)
    # One element more or less than a normal distribution says is no deviation.
    if abs(off) <= _DEVIATIONS * variance**0.5 + 1:
        return None
    total, allowed = sum(n for _, n, _ in kept), variance**0.5 * _DEVIATIONS
    return f"dropout kept {off:+.0f} elements of {total}, {_DEVIATIONS} deviations are {allowed:.0f}"


@contextlib.contextmanager
def replayed(
    recorded: Sequence[torch.Tensor] | None, kept: list[Kept] | None = None, *, keeps_zeros: bool = False
) -> Iterator[None]:
    """Within, random operators return what they did in the run that recorded them, in the same order.

    Args:
        recorded: Their results; None leaves the operators as they are.
        keeps_zeros: Whether zeros were kept rather than dropped.
        kept: Gets for each dropout how many elements that are not zero it kept, of how many, and the share to keep.
    """
    if recorded is None:
        yield
        return
    waiting = list(recorded)

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p == 0:  # of modules that always call it
            return x
        mask = waiting.pop(0).to(x.device) != 0
        if not training:  # the result is the operand, which the program may have written to since
            return x
        mask |= (x.abs() < _NOTHING) & keeps_zeros
        if kept is not None:
            shows = x.abs() > _LEAST
            kept.append((int((mask & shows).sum()), int(shows.sum()), 1 - p))
        return x * mask / (1 - p)

    def drawn(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **keywords: Any) -> torch.Tensor:
            expected = original(*args, **keywords)
            value = waiting.pop(0).to(expected)
            if kept is not None and name in ("rand", "rand_like") and ((value < 0) | (value >= 1)).any():
                kept.append((1, 0, 1.0))
            return value

        return take

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "dropout", dropout))
        for name in ("rand_like", "randn_like", "bernoulli", "rand", "randn"):
            stack.enter_context(mock.patch.object(torch, name, drawn(name, getattr(torch, name))))
        yield
