"""Matrix products: along the summed dimension both operands are cleared, because 0 times a NaN of a tail is NaN."""

from __future__ import annotations

from typing import Any

from kp_dynamo.passes.padding.atoms import Dims, Padded, Refused, broadcast, has_tail
from kp_dynamo.passes.padding.layout import aligned
from kp_dynamo.passes.padding.rules import Call, aten, rule

# Operator -> number of arguments before the factors.
_PRODUCTS: dict[Any, int] = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.dot.default: 0, aten.mv.default: 0, aten.vdot.default: 0,
    aten.addmm.default: 1, aten.baddbmm.default: 1, aten.addmv.default: 1,
}  # fmt: skip


@rule(*_PRODUCTS)
def _product(call: Call) -> Padded:
    first = _PRODUCTS[call.target]
    x, y = call.args[first : first + 2]
    x, y = _with_common_batch(call, x, y)
    along = len(x.dims) - 1, max(0, len(y.dims) - 2)
    summed = max(x.dims[along[0]], y.dims[along[1]], key=len)
    x = aligned(call.masks, x, (*x.dims[:-1], summed))
    y = aligned(call.masks, y, (*y.dims[: along[1]], summed, *y.dims[along[1] + 1 :]))
    factors = call.masks.filled(x, [along[0]], 0), call.masks.filled(y, [along[1]], 0)
    result = call.run(*call.args[:first], *factors, *call.args[first + 2 :], **call.kwargs)
    return Padded(result, _dims_of_product(x, y))


def _with_common_batch(call: Call, x: Padded, y: Padded) -> tuple[Padded, Padded]:
    if len(x.dims) < 3:
        return x, y
    batch = max(x.dims[0], y.dims[0], key=len)
    return aligned(call.masks, x, (batch, *x.dims[1:])), aligned(call.masks, y, (batch, *y.dims[1:]))


def _dims_of_product(x: Padded, y: Padded) -> Dims:
    batch = x.dims[:1] if len(x.dims) == 3 else ()
    rows = (x.dims[-2],) if len(x.dims) > 1 else ()
    columns = (y.dims[-1],) if len(y.dims) > 1 else ()
    return (*batch, *rows, *columns)


@rule(aten.addbmm.default)
def _addbmm(call: Call) -> Padded:
    if any(has_tail(atoms) for x in call.operands() for atoms in x.dims):
        raise Refused("a batch of products is summed over a padded dimension")
    return Padded(call.unchanged(), _dims_of_product(*call.args[1:3])[1:])


@rule(aten._cdist_forward.default)
def _distances(call: Call) -> Padded:
    x, y, dims = _rows(call, *call.args[:2])
    factors = call.masks.filled(x, [-1], 0), call.masks.filled(y, [-1], 0)
    return Padded(call.run(*factors, *call.args[2:]), dims)


@rule(aten._cdist_backward.default)
def _distances_backward(call: Call) -> Padded:
    """A distance of 0 has no gradient."""
    gradient, x, y, order, distances = call.args
    x, y, dims = _rows(call, x, y)
    gradient, distances = (call.masks.cleared(aligned(call.masks, v, dims)) for v in (gradient, distances))
    return x.replaced(call.run(gradient, call.masks.cleared(x), call.masks.cleared(y), order, distances))


def _rows(call: Call, x: Padded, y: Padded) -> tuple[Padded, Padded, Dims]:
    """[..., P, D], [..., R, D] with their batches at the same places, and the dimensions of [..., P, R]."""
    batch = broadcast([x.dims[:-2], y.dims[:-2]])
    x, y = (aligned(call.masks, v, (*batch, *v.dims[-2:])) for v in (x, y))
    return x, y, (*batch, x.dims[-2], y.dims[-2])
