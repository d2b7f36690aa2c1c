"""What the arguments of a model say about one sample of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.aot.resized_inputs import batch_of
from kp_dynamo.exceptions import TPUConfigurationError


@dataclass(frozen=True)
class Samples:
    """What the arguments of a model say about one sample of the batch.

    Attributes:
        batch: The batch size of the given arguments.
        tokens: Tokens of a sample, if the first argument is an integer tensor; else 0.
        num_bytes: Bytes of the inputs of a sample.
        rows: Rows of activations that a matmul has for each sample, at least: tokens of the shortest argument that has
            some, such as that of a decoder.
    """

    batch: int
    tokens: int
    num_bytes: int
    rows: int = 1


def samples_of(args: Sequence[Any]) -> Samples:
    """What the arguments say about a sample.

    Raises:
        TPUConfigurationError: No tensor has a batch dimension, or one is marked as dynamic.
    """
    tensors = [t for t in torch.utils._pytree.tree_leaves(list(args)) if isinstance(t, torch.Tensor)]
    batch = batch_of(args)
    if any(getattr(t, mark, None) for t in tensors for mark in ("_dynamo_dynamic_indices", "_dynamo_dynamic_range")):
        raise TPUConfigurationError(
            "args has a tensor with a dimension that is marked as dynamic, which is unsupported: a plan is for one "
            "length. Allowed: tensors without marks. Try: plan for each length that matters."
        )
    first = args[0]
    is_tokens = isinstance(first, torch.Tensor) and _is_of_tokens(first)
    per_sample = [t for t in tensors if t.dim() and t.shape[0] == batch]
    num_bytes = sum(t.numel() * t.element_size() for t in per_sample) // batch
    lengths = [t.numel() // batch for t in per_sample if t.dim() > 1 and _is_of_tokens(t)] if is_tokens else []
    return Samples(batch, first.numel() // batch if is_tokens else 0, num_bytes, max(1, min(lengths, default=1)))


def _is_of_tokens(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
