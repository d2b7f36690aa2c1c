"""Matmuls: both operands are cleared along the contracted dimension, because 0 times a NaN in a tail is NaN."""

from __future__ import annotations

from typing import Any

from kp_dynamo.passes.padding.atoms import Dims, Padded, Refused, broadcast, has_tail
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.mm.default, layouts={"self": "ik", "mat2": "kj"})
@rule(aten.bmm.default, layouts={"self": "bik", "mat2": "bkj"})
@rule(aten.mv.default, layouts={"self": "ik", "vec": "k"})
@rule(aten.dot.default, layouts={"self": "k", "tensor": "k"})
@rule(aten.vdot.default, layouts={"self": "k", "other": "k"})
def _matmul(call: Call) -> Padded:
    return _masked_matmul(call, *call.args)


@rule(aten.addmm.default, layouts={"self": "ij", "mat1": "ik", "mat2": "kj"})
@rule(aten.baddbmm.default, layouts={"self": "bij", "batch1": "bik", "batch2": "bkj"})
@rule(aten.addmv.default, layouts={"self": "i", "mat": "ik", "vec": "k"})
def _matmul_and_add(call: Call) -> Padded:
    added, x, y = call.args
    return _masked_matmul(call, x, y, added)


def _masked_matmul(call: Call, x: Padded, y: Padded, *added: Padded) -> Padded:
    factors = call.masks.filled(x, [-1], 0), call.masks.filled(y, [max(0, len(y.dims) - 2)], 0)
    return Padded(call.run(*added, *factors, **call.kwargs), _matmul_dims(x, y))


def _matmul_dims(x: Padded, y: Padded) -> Dims:
    batch = x.dims[:1] if len(x.dims) == 3 else ()
    rows = (x.dims[-2],) if len(x.dims) > 1 else ()
    columns = (y.dims[-1],) if len(y.dims) > 1 else ()
    return (*batch, *rows, *columns)


@rule(aten.addbmm.default)
def _addbmm(call: Call) -> Padded:
    if any(has_tail(atoms) for x in call.operands() for atoms in x.dims):
        raise Refused("addbmm with a padded dimension is unsupported")
    return Padded(call.unchanged(), _matmul_dims(*call.args[1:3])[1:])


@rule(aten._cdist_forward.default, layouts={"x1": "...pk", "x2": "...rk"})
def _distances(call: Call) -> Padded:
    x, y = call.args[:2]
    factors = call.masks.filled(x, [-1], 0), call.masks.filled(y, [-1], 0)
    batch = broadcast([x.dims[:-2], y.dims[:-2]])
    return Padded(call.run(*factors, *call.args[2:]), (*batch, x.dims[-2], y.dims[-2]))


@rule(aten._cdist_backward.default, layouts={"grad": "...pr", "x1": "...pk", "x2": "...rk", "cdist": "...pr"})
def _distances_backward(call: Call) -> Any:
    """Tails get a distance of 0, which has no gradient."""
    gradient, x, y, order, distances = call.args
    cleared = map(call.masks.cleared, (gradient, x, y))
    return x.replaced(call.run(*cleared, order, call.masks.cleared(distances)))
