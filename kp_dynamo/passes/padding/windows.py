"""Convolutions and pools: windows past the true end see the values that they see past the end of a tensor."""

from __future__ import annotations

import math
from typing import Any

from kp_dynamo.passes.padding.atoms import Dims, Padded, Refused, has_tail, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.operands import with_canonical
from kp_dynamo.passes.padding.rules import aten, rule


def _spatial(call: Call, x: Padded) -> Padded:
    """`x` with zeros in the tails of its channel and window dimensions."""
    return x.replaced(call.masks.filled(x, range(1, len(x.dims)), 0))


def _window_dims(x: Padded, channels: Any, like: Any) -> Dims:
    return (x.dims[0], channels, *plain(like.shape[2:]))


def _batch_and_windows(call: Call) -> dict[str, str]:
    """Gradient and input share the batch layout; channels and windows are canonical."""
    term = with_canonical(slice(1, None), len(call.args[0].dims))
    return {"grad_output": term, "input": term}


@rule(aten.convolution.default, layouts=_batch_and_windows)
def _convolution(call: Call) -> Padded:
    x, weight, bias = _spatial(call, call.args[0]), call.args[1], call.args[2]
    if any(map(has_tail, weight.dims)):
        raise Refused("the weight of a convolution has a padded dimension")
    channels = plain(call.like.shape[1:2])[0]
    return Padded(call.run(x, weight, bias, *call.args[3:]), _window_dims(x, channels, call.like))


@rule(aten.convolution_backward.default, layouts=_batch_and_windows)
def _convolution_backward(call: Call) -> tuple[Padded | None, ...]:
    """The gradient of the weight sums over batch and windows, so their tails are cleared as well."""
    gradient, x = call.args[:2]
    cleared = call.masks.cleared(gradient), call.masks.cleared(x)
    results = call.run(*cleared, *call.args[2:])
    dims = x.dims, call.args[2].dims, (plain(gradient.shape[1:2]))
    return tuple(None if r is None else Padded(r, d) for r, d in zip(results, dims, strict=True))


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(call: Call) -> tuple[Padded, Padded]:
    x, ceil_mode = call.args[0], call.arg(5, False)
    first = len(x.dims) - 2
    if ceil_mode or (has_tail(x.dims[-1]) and x.dims[-2]):
        raise Refused("max pooling with ceil_mode=True, or with a padded width, is unsupported")
    result = call.run(call.masks.filled(x, (first, first + 1), -math.inf), *call.args[1:])
    dims = (*x.dims[:first], *plain(call.like[0].shape[first:]))
    return Padded(result[0], dims), Padded(result[1], dims)


@rule(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(call: Call) -> Any:
    gradient, x, indices = call.args[0], call.args[1], call.args[-1]
    first = len(x.dims) - 2
    filled = call.masks.filled(x, (first, first + 1), -math.inf)
    cleared = call.masks.cleared(gradient), filled, *call.args[2:-1], call.masks.cleared(indices)
    return x.replaced(call.run(*cleared))
