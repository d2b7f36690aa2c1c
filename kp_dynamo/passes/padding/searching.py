"""Searches in sorted numbers: the tail is filled to sort last, and results are clamped to the true end."""

from __future__ import annotations

import math
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Dims, Padded, Refused
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.bucketize.Tensor, aten.bucketize.Scalar, layouts={"self": "..."})
def _bucketize(call: Call) -> Padded:
    x, boundaries = call.args
    dims = x.dims if isinstance(x, Padded) else ()
    return _searched(call, boundaries, dims, (x, call.masks.filled(boundaries, [-1], math.inf)))


@rule(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def _search_sorted(call: Call) -> Padded:
    numbers, x = call.args
    if call.kwargs.get("sorter") is not None:
        raise Refused("searchsorted with a sorter is unsupported")
    dims = x.dims if isinstance(x, Padded) else ()
    return _searched(call, numbers, dims, (call.masks.filled(numbers, [-1], math.inf), x))


def _searched(call: Call, numbers: Padded, dims: Dims, operands: tuple[Any, ...]) -> Padded:
    """NaN, and the largest number with right=True, are found after the tail, so the result is clamped."""
    places = call.run(*operands, **call.kwargs)
    count = torch.as_tensor(call.masks.true_count(numbers, [-1])).to(places.dtype)
    return Padded(torch.minimum(places, count), dims)
