"""Values on the way between the pieces of a divided graph, and back to the caller's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.lowering.host_layout import strides_of, to_host


def taking_from_device(run: Callable[..., Any], passed: frozenset[int]) -> Callable[..., Any]:
    """`run`, whose arguments at the positions `passed` are on the device when it is called.

    They are there already, unless a piece returned a view of a CPU tensor of the caller.
    """

    def called(*args: Any) -> Any:
        if any(args[i].device.type == "cpu" for i in passed):
            args = tuple(a.to(xla.device()) if i in passed else a for i, a in enumerate(args))
        return run(*args)

    return called


def returning_to_host(run: Callable[..., Any], eager: Sequence[Any]) -> Callable[..., Any]:
    """`run`, with the results that it leaves on the device moved to the CPU, differentiably, with eager's strides.

    Args:
        run: The whole graph.
        eager: Fake tensors of its results with eager's strides.
    """
    strides = [strides_of(value, {}) for value in eager]

    def called(*args: Any) -> list[Any]:
        results = list(run(*args))
        there = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.device.type == "xla"]
        if there:
            moved = to_host([results[i].detach() for i in there], [strides[i] for i in there])
            for position, copy in zip(there, moved, strict=True):
                results[position] = _Moved.apply(results[position], [copy])  # type: ignore[no-untyped-call]
        return results

    return called


class _Moved(torch.autograd.Function):
    """A result and its copy on the CPU -> the copy, whose gradient goes back to the device.

    One node a result: a result that gets no gradient passes none on.
    """

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, copies: list[torch.Tensor]) -> torch.Tensor:
        # In a list: a tensor argument would come back as a view of itself, which callers may not write to.
        if not result.requires_grad:
            ctx.mark_non_differentiable(copies[0])
        return copies[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(xla.device()), None
