"""The gradient of a result that a compiled graph returns without one, computed from the graph's other values.

Autograd calls it only if the result has a gradient, and adds the gradients to those of the compiled backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Replay:
    """How a result is computed.

    Attributes:
        piece: Computes it from its sources, with autograd.
        is_read: Of each source, whether a gradient depends on its values; such a source may not change before it.
        autocasts: The arguments of the autocast regions in which it runs, outermost first.
    """

    piece: Callable[..., torch.Tensor]
    is_read: tuple[bool, ...]
    autocasts: tuple[tuple[Any, ...], ...]


def with_gradient(result: torch.Tensor, replay: Replay, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """`result`, a tensor that requires no gradient, with the gradient of the piece that computes it.

    Args:
        result: What the piece gives for the sources.
        replay: How it is computed.
        sources: The tensors that get gradients.
    """
    return _Replayed.apply(result, replay, *sources)  # type: ignore[no-any-return,no-untyped-call]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, replay: Replay, *sources: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        device = result.device.type
        around = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.replay, ctx.autocasts = replay, (around, *replay.autocasts)
        marked = list(zip(sources, replay.is_read, strict=True))
        ctx.save_for_backward(*(source if is_read else None for source, is_read in marked))
        ctx.unread = [None if is_read else source.detach() for source, is_read in marked]
        return result.detach()  # an argument itself would be a view, which nobody may write to

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        is_wanted = ctx.needs_input_grad[2:]
        if grad is None:
            return (None,) * (2 + len(is_wanted))
        read = ctx.saved_tensors  # raises if one of them has changed
        given = [other if saved is None else saved.detach() for saved, other in zip(read, ctx.unread, strict=True)]
        sources = [tensor.requires_grad_(wanted) for tensor, wanted in zip(given, is_wanted, strict=True)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device, dtype, enabled, *_ in ctx.autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            result = ctx.replay.piece(*sources)
        wanted = [source for source in sources if source.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grad))
        return None, None, *(next(found) if source.requires_grad else None for source in sources)
