"""The gradient of a result that a compiled graph returns without one, computed from the graph's other values.

Autograd calls it only if the result has a gradient, and adds the gradients to those of the compiled backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Autocast = tuple[Any, ...]
"""The arguments of `torch.autocast`."""


def with_gradient(
    result: torch.Tensor,
    piece: Callable[..., torch.Tensor],
    sources: Sequence[torch.Tensor],
    autocasts: Sequence[Autocast],
) -> torch.Tensor:
    """`result`, whose gradient is that of `piece(*sources)`.

    Args:
        result: A tensor that requires no gradient and has these values.
        piece: Computes it from the sources, with autograd.
        sources: The tensors that get gradients.
        autocasts: The autocast regions in which it runs, outermost first.
    """
    here = result.device.type
    around = (here, torch.get_autocast_dtype(here), torch.is_autocast_enabled(here))
    return _Replayed.apply(result, piece, (around, *autocasts), *sources)  # type: ignore[no-any-return,no-untyped-call]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, piece: Any, autocasts: Any, *sources: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.piece, ctx.autocasts = piece, autocasts
        ctx.save_for_backward(*sources)
        return result.detach()  # an argument itself would be a view, which nobody may write to

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        is_wanted = ctx.needs_input_grad[3:]
        if grad is None:
            return (None,) * (3 + len(is_wanted))
        sources = [t.detach().requires_grad_(needed) for t, needed in zip(ctx.saved_tensors, is_wanted, strict=True)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device, dtype, enabled, *_ in ctx.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            result = ctx.piece(*sources)
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad))
        return None, None, None, *(next(found) if source.requires_grad else None for source in sources)
