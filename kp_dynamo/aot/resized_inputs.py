"""The inputs of a model at another batch size, as tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.exceptions import TPUConfigurationError


def resized(args: Sequence[Any], batch: int) -> tuple[Any, ...]:
    """The arguments at another batch size: every tensor that begins with the batch of the first one."""
    given = batch_of(args)

    def at_batch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != given:
            return tensor
        made = torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    found: list[Any] = torch.utils._pytree.tree_map_only(torch.Tensor, at_batch, list(args))
    return tuple(found)


def batch_of(args: Sequence[Any], name: str = "args") -> int:
    """The first size of the first tensor that has one; `name` is what an error calls the arguments."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(list(args)) if isinstance(t, torch.Tensor)]
    batch = next((int(t.shape[0]) for t in tensors if t.dim()), 0)
    if batch < 1:
        raise TPUConfigurationError(
            f"{name} has no tensor with a batch dimension. Allowed: arguments whose first tensor begins with the "
            "batch, as (torch.zeros(8, 2048, dtype=torch.int64),)."
        )
    return batch
