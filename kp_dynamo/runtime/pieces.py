"""Values on the way between the pieces of a divided graph that records no gradient, and back to the CPU."""

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
    """`run`, which records no gradient, with the results that it leaves on the device moved to the CPU.

    Args:
        run: The whole graph.
        eager: Fake tensors of its results with eager's strides.
    """
    strides = [strides_of(value, {}) for value in eager]

    def called(*args: Any) -> list[Any]:
        results = list(run(*args))
        # Views of the caller's CPU tensors are there already.
        there = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.device.type == "xla"]
        moved = to_host([results[i] for i in there], [strides[i] for i in there])
        for position, result in zip(there, moved, strict=True):
            results[position] = result
        return results

    return called
