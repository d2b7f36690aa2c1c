"""Views: the same elements with other dimensions."""

from __future__ import annotations

import torch
from torch._prims_common import make_contiguous_strides_for

from kp_dynamo.passes.padding.atoms import (
    Padded,
    Refused,
    broadcast,
    equal_sizes,
    has_tail,
    is_padded,
    plain,
    product,
)
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import gathered, viewed, with_one_atom
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, layouts="...")
def _view(call: Call) -> Padded:
    return viewed(call.masks, call.args[0], list(call.like.shape))


@rule(aten.as_strided.default, layouts="...", lengths="stride storage_offset")
def _as_strided(call: Call) -> Padded:
    """Supported as torch's decompositions use it: in place of a view of a contiguous tensor."""
    x, size, stride, offset = *call.args[:3], call.named_arg("storage_offset", 3)
    wanted = (*make_contiguous_strides_for(size), product(tuple(size)))
    is_dense = all(map(equal_sizes, (*stride, product(tuple(x.shape))), wanted))
    if not (is_dense and x.tensor.is_contiguous() and offset in (None, 0)):
        raise Refused("as_strided reads other memory than its operand's elements in order")
    return viewed(call.masks, x, list(call.like.shape))


@rule(aten.view_as_real.default, layouts="...")
def _view_as_real(call: Call) -> Padded:
    return Padded(call.unchanged(), (*call.args[0].dims, *plain([2])))


@rule(aten.view_as_complex.default, layouts="...")
def _view_as_complex(call: Call) -> Padded:
    return Padded(call.unchanged(), call.args[0].dims[:-1])


@rule(aten.permute.default, layouts="...")
def _permute(call: Call) -> Padded:
    x, order = call.args
    return Padded(call.unchanged(), tuple(x.dims[d] for d in order))


@rule(aten.transpose.int, layouts="...")
def _transpose(call: Call) -> Padded:
    x, first, second = call.args
    order = list(range(len(x.dims)))
    order[first], order[second] = order[second], order[first]
    return Padded(call.unchanged(), tuple(x.dims[d] for d in order))


@rule(aten.t.default, layouts="...")
def _t(call: Call) -> Padded:
    return Padded(call.unchanged(), call.args[0].dims[::-1])


@rule(aten.unsqueeze.default, layouts="...")
def _unsqueeze(call: Call) -> Padded:
    x, d = call.args
    d %= len(x.dims) + 1
    return Padded(call.unchanged(), (*x.dims[:d], (), *x.dims[d:]))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, layouts="...")
def _squeeze(call: Call) -> Padded:
    x, dims = call.args[0], call.arg(1, range(len(call.args[0].dims)))
    asked = {d % len(x.dims) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [d for d, atoms in enumerate(x.dims) if d not in asked or atoms]
    return Padded(call.unchanged(), tuple(x.dims[d] for d in kept))


@rule(aten.expand.default, layouts="...")
def _expand(call: Call) -> Padded:
    x, shape = call.args[0], list(call.like.shape)
    new = len(shape) - len(x.dims)
    wanted = plain(shape)
    dims = tuple(x.dims[i - new] if i >= new and x.dims[i - new] else wanted[i] for i in range(len(shape)))
    return Padded(x.tensor.expand([product(atoms) for atoms in dims]), dims)


@rule(aten.repeat.default, layouts="...")
def _repeat(call: Call) -> Padded:
    x, repeats = call.args
    new = len(repeats) - len(x.dims)
    old = ((),) * new + x.dims
    dims = tuple((*plain([r])[0], *atoms) for r, atoms in zip(repeats, old, strict=True))
    return Padded(call.unchanged(), dims)


@rule(aten.stack.default, layouts="...")
def _stack(call: Call) -> Padded:
    tensors, d = call.args[0], call.arg(1, 0)
    d %= len(tensors[0].dims) + 1
    one = broadcast([x.dims for x in tensors])
    return Padded(call.unchanged(), (*one[:d], *plain([len(tensors)]), *one[d:]))


@rule(aten.unbind.int, layouts="...")
def _unbind(call: Call) -> tuple[Padded, ...]:
    x, d = call.args[0], call.arg(1, 0)
    d %= len(x.dims)
    if has_tail(x.dims[d]):
        raise Refused("unbind along the padded dimension: the number of results depends on the length")
    return tuple(Padded(t, x.dims[:d] + x.dims[d + 1 :]) for t in call.unchanged())


@rule(aten.diagonal.default)
def _diagonal(call: Call) -> Padded:
    x = call.args[0]
    offset, first, second = call.arg(1, 0), call.arg(2, 0) % len(x.dims), call.arg(3, 1) % len(x.dims)
    if is_padded(offset):
        raise Refused("the offset of a diagonal depends on the length")
    kept = tuple(atoms for d, atoms in enumerate(x.dims) if d not in (first, second))
    return Padded(call.unchanged(), kept + plain(call.like.shape[-1:]))


@rule(aten.diagonal_backward.default)
def _diagonal_backward(call: Call) -> Padded:
    """Each row of the result gets the gradient element of the diagonal position that it crosses."""
    gradient, sizes, offset, first, second = call.args
    if is_padded(offset):
        raise Refused("the offset of a diagonal depends on the length")
    rank = len(sizes)
    first, second = first % rank, second % rank
    rows, columns = call.masks.positions(sizes[first]), call.masks.positions(sizes[second])
    spread = gathered(gradient.tensor, rank - 2, rows + min(offset, 0)).unsqueeze(-1)
    crosses = rows.unsqueeze(-1) + offset == columns
    placed = torch.where(crosses, spread, torch.zeros((), dtype=spread.dtype))
    return Padded(placed.movedim((-2, -1), (first, second)), plain(sizes))


@rule(aten.unfold.default, layouts="...")
def _unfold(call: Call) -> Padded:
    x, d, size, step = call.args
    if is_padded(size) or is_padded(step):
        raise Refused("the size or step of unfold depends on the length")
    x = with_one_atom(call.masks, x, d % len(x.dims))
    dims = list(x.dims)
    dims[d] = plain([call.like.shape[d]])[0]
    return Padded(call.run(x, d, size, step), (*dims, *plain([size])))


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Padded:
    x = call.args[0]
    if is_padded(call.arg(1, 0)):
        raise Refused("the diagonal of tril or triu depends on the length")
    return Padded(call.unchanged(), x.dims)
