"""Dimensions that the user marked as varying from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.buckets import refusals
from kp_dynamo.buckets.symbolic_sizes import example_value, is_symbolic
from kp_dynamo.exceptions import TPUValidationError


def mark_sequence(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Mark a dimension whose size varies from call to call; `options={"buckets": ...}` pads such dimensions.

    Call it on each input of a compiled model, at least before the first call: `model(mark_sequence(ids, 1))`. If the
    model fixes the size anyway (it branches on it, or a table has exactly that size), each size is compiled
    separately; torch's `mark_dynamic` makes that an error.

    Args:
        tensor: An input of the model.
        dim: The dimension; a negative one counts from the end.

    Returns:
        `tensor` itself.

    Raises:
        TPUValidationError: `tensor` is not a tensor, or it has no such dimension.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TPUValidationError(f"mark_sequence takes a tensor, not a {type(tensor).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise TPUValidationError(
            f"dim={dim!r} is invalid: not a dimension of a tensor of shape {tuple(tensor.shape)}. Allowed: "
            f"{-tensor.dim()} to {tensor.dim() - 1}"
        )
    torch._dynamo.maybe_mark_dynamic(tensor, dim % tensor.dim())
    return tensor


def warn_static_dims(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Warn about sizes that were marked as varying but that the model specializes: each is compiled separately."""
    examples = [example_value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    for number, (value, example) in enumerate(zip(inputs, examples, strict=True)):
        for d in getattr(value, "_dynamo_weak_dynamic_indices", ()):
            if value.shape[d] > 1 and not is_symbolic(example.shape[d]):
                refusals.warn(
                    f"dimension {d} of input {number} was marked as varying, but the model fixes it at "
                    f"{value.shape[d]}: it is compiled for each length. Try: torch._dynamo.mark_dynamic instead of "
                    "mark_sequence, which reports where"
                )
