"""The inputs of a model at another batch size, as tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.exceptions import TPUConfigurationError


@dataclass(frozen=True)
class Samples:
    """What the arguments of a model say about one sample of the batch.

    Attributes:
        batch: The batch size of the given arguments.
        tokens: Tokens of a sample, if the first argument is an integer tensor; else 0.
        num_bytes: Bytes of the inputs of a sample.
    """

    batch: int
    tokens: int
    num_bytes: int

    @property
    def rows(self) -> int:
        """Rows of activations that a matmul has for each sample, at least."""
        return max(1, self.tokens)


def samples_of(args: Sequence[Any]) -> Samples:
    """What the arguments say about a sample.

    Raises:
        TPUConfigurationError: No tensor has a batch dimension, or one is marked as dynamic.
    """
    tensors = [t for t in torch.utils._pytree.tree_leaves(list(args)) if isinstance(t, torch.Tensor)]
    batch = _batch(args)
    if any(getattr(t, mark, None) for t in tensors for mark in ("_dynamo_dynamic_indices", "_dynamo_dynamic_range")):
        raise TPUConfigurationError(
            "args has a tensor with a dimension that is marked as dynamic, which is unsupported: a plan is for one "
            "length. Allowed: tensors without marks. Try: plan for each length that matters."
        )
    first = args[0]
    is_tokens = isinstance(first, torch.Tensor) and not first.dtype.is_floating_point and first.dtype != torch.bool
    per_sample = [t for t in tensors if t.dim() and t.shape[0] == batch]
    num_bytes = sum(t.numel() * t.element_size() for t in per_sample) // batch
    return Samples(batch, first.numel() // batch if is_tokens else 0, num_bytes)


def resized(args: Sequence[Any], batch: int) -> tuple[Any, ...]:
    """The arguments at another batch size: every tensor that begins with the batch of the first one."""
    given = _batch(args)

    def at_batch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != given:
            return tensor
        made = torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    found: list[Any] = torch.utils._pytree.tree_map_only(torch.Tensor, at_batch, list(args))
    return tuple(found)


def _batch(args: Sequence[Any]) -> int:
    """The first size of the first tensor that has one."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(list(args)) if isinstance(t, torch.Tensor)]
    batch = next((int(t.shape[0]) for t in tensors if t.dim()), 0)
    if batch < 1:
        raise TPUConfigurationError(
            "args has no tensor with a batch dimension. Allowed: arguments whose first tensor begins with the batch, "
            "as (torch.zeros(8, 2048, dtype=torch.int64),)."
        )
    return batch
