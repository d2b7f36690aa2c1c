"""Normalization over dimensions without a tail; over a padded one it is decomposed into sums and true counts."""

from __future__ import annotations

from typing import Any

from kp_dynamo.passes.padding.atoms import Padded, has_tail, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.native_layer_norm.default, layouts={"input": "..."})
def _layer_norm(call: Call) -> Any:
    x, over = call.args[0], len(call.args[1])
    outer = x.dims[: len(x.dims) - over]
    if any(map(has_tail, x.dims[len(outer) :])):
        return NotImplemented
    statistics = outer + ((),) * over
    result, mean, scale = call.unchanged()
    return x.replaced(result), Padded(mean, statistics), Padded(scale, statistics)


@rule(
    aten.native_layer_norm_backward.default,
    layouts={"grad_out": "...", "input": "...", "mean": "...", "rstd": "..."},
)
def _layer_norm_backward(call: Call) -> Any:
    """The gradients of weight and bias sum over the outer dimensions, so their tails are cleared."""
    gradient, x, shape, mean, scale, *rest = call.args
    outer = len(x.dims) - len(shape)
    if any(map(has_tail, x.dims[outer:])):
        return NotImplemented
    cleared = (call.masks.filled(v, range(outer), 0) for v in (gradient, x, mean, scale))
    gradient, x_cleared, mean, scale = cleared
    results = call.run(gradient, x_cleared, shape, mean, scale, *rest)
    dims = x.dims, plain(shape), plain(shape)
    return tuple(None if r is None else Padded(r, d) for r, d in zip(results, dims, strict=True))
