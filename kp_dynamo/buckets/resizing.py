"""Pads a tensor to a bucket and slices it to its true sizes, on the host."""

from __future__ import annotations

import os
from typing import Any

import torch

from kp_dynamo.buckets.symbolic_sizes import Shape
from kp_dynamo.lowering import tensor_shardings
from kp_dynamo.lowering.host_layout import to_host


def is_poisoned() -> bool:
    """Whether padding is filled with values that reveal reads of it: `KP_TPU_POISON=1`."""
    return os.environ.get("KP_TPU_POISON", "0") not in ("", "0")


class Resize(torch.autograd.Function):
    """`resized` with its gradient, whose padding must not be read either."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, shape: Shape, poisons: bool) -> torch.Tensor:
        ctx.shape, ctx.poisons = tuple(tensor.shape), poisons
        ctx.set_materialize_grads(False)
        return resized(tensor, shape, poisons=poisons)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if gradient is None:  # undefined in eager too
            return None, None, None
        # Recorded under create_graph=True, so that a double backward reaches AOTAutograd's backward, which rejects it.
        return Resize.apply(gradient, ctx.shape, ctx.poisons), None, None  # type: ignore[no-untyped-call]


def resized(tensor: torch.Tensor, shape: Shape, *, poisons: bool) -> torch.Tensor:
    """A dense copy of `tensor`, sliced or padded to `shape` on the host, with its strides in the same order.

    It lies on several devices as `tensor` does. Otherwise every device would compute the whole batch.
    """
    host: torch.Tensor = to_host([tensor.detach()], [None])[0]
    common = tuple(slice(0, min(a, b)) for a, b in zip(tensor.shape, shape, strict=True))
    if all(new <= old for new, old in zip(shape, tensor.shape, strict=True)):
        return tensor_shardings.divided_like(tensor, host[common].clone().to(tensor.device))
    order = sorted(range(host.dim()), key=host.stride, reverse=True)
    # Not a view of a permuted tensor: a graph may write to it, and autograd forbids writes to a view from a Function.
    padded = torch.empty_permuted(shape, order, dtype=host.dtype, device="cpu").fill_(_padding(host.dtype, poisons))
    padded[common] = host[common]
    return tensor_shardings.divided_like(tensor, padded.to(tensor.device))


def _padding(dtype: torch.dtype, poisons: bool) -> float | int | bool:
    """0, or a value that reveals reads of it: NaN, true, or a number outside every valid range."""
    if not poisons:
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 2
