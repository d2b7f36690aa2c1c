"""The backward of `torch._weight_norm`, for `nn.utils.weight_norm`: torch 2.9 decomposes only its forward."""

from __future__ import annotations

import torch

from kp_dynamo.ops.compute_dtype import compute_dtype


def weight_norm_interface_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of v and g, where `weight = v * (g / norms)`.

    Args:
        gradient: That of the weight.
        v: The direction.
        g: The lengths, of size 1 in all dimensions but `dim`.
        norms: The norms of v over these dimensions, in the shape of g.
        dim: The first or the last dimension.
    """
    dtype = compute_dtype(v.dtype)
    wide, direction, length, norm = (x.to(dtype) for x in (gradient, v, g, norms))
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = wide * direction
    along = along.sum(others, keepdim=True) if others else along
    of_v = length / norm * (wide - direction * (along / (norm * norm)))
    return of_v.to(v.dtype), (along / norm).to(g.dtype)
