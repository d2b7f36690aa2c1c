"""Random operators of a program, and their results in another run put in their place.

The masks of dropout are read off its results: zeros are what was dropped. A result that was zero before is taken for
dropped, which changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F


@contextlib.contextmanager
def replayed(recorded: Sequence[torch.Tensor] | None) -> Iterator[None]:
    """Within, random operators return what they did in the run that recorded them, in the same order."""
    if recorded is None:
        yield
        return
    waiting = list(recorded)

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        mask = waiting.pop(0).to(x.device) != 0
        return x * mask / (1 - p) if training else x

    def drawn(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any, **keywords: Any) -> torch.Tensor:
            expected = original(*args, **keywords)
            return waiting.pop(0).to(expected)

        return take

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(F, "dropout", dropout))
        for name in ("rand_like", "randn_like", "bernoulli", "rand", "randn"):
            stack.enter_context(mock.patch.object(torch, name, drawn(getattr(torch, name))))
        yield
