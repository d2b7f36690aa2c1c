"""Views: the same elements under other dimensions."""

from __future__ import annotations

from kp_dynamo.passes.padding.atoms import (
    Padded,
    Refused,
    has_tail,
    is_padded,
    is_prefix,
    plain,
    product,
)
from kp_dynamo.passes.padding.layout import all_aligned, viewed, with_one_atom
from kp_dynamo.passes.padding.rules import Call, aten, rule


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(call: Call) -> Padded:
    return viewed(call.masks, call.args[0], list(call.like.shape))


@rule(aten.permute.default)
def _permute(call: Call) -> Padded:
    x, order = call.args
    return Padded(call.unchanged(), tuple(x.dims[d] for d in order))


@rule(aten.transpose.int)
def _transpose(call: Call) -> Padded:
    x, first, second = call.args
    order = list(range(len(x.dims)))
    order[first], order[second] = order[second], order[first]
    return Padded(call.unchanged(), tuple(x.dims[d] for d in order))


@rule(aten.t.default)
def _t(call: Call) -> Padded:
    return Padded(call.unchanged(), call.args[0].dims[::-1])


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Padded:
    x, d = call.args
    d %= len(x.dims) + 1
    return Padded(call.unchanged(), (*x.dims[:d], (), *x.dims[d:]))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> Padded:
    x, dims = call.args[0], call.arg(1, range(len(call.args[0].dims)))
    asked = {d % len(x.dims) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = [d for d, atoms in enumerate(x.dims) if d not in asked or atoms]
    return Padded(call.unchanged(), tuple(x.dims[d] for d in kept))


@rule(aten.expand.default)
def _expand(call: Call) -> Padded:
    x, shape = call.args[0], list(call.like.shape)
    new = len(shape) - len(x.dims)
    wanted = plain(shape)
    dims = tuple(x.dims[i - new] if i >= new and x.dims[i - new] else wanted[i] for i in range(len(shape)))
    return Padded(x.tensor.expand([product(atoms) for atoms in dims]), dims)


@rule(aten.repeat.default)
def _repeat(call: Call) -> Padded:
    x, repeats = call.args
    if any(map(is_padded, repeats)):
        raise Refused("repeated as often as the length says")
    new = len(repeats) - len(x.dims)
    old = ((),) * new + x.dims
    dims = tuple((*plain([r])[0], *atoms) for r, atoms in zip(repeats, old, strict=True))
    return Padded(call.unchanged(), dims)


@rule(aten.stack.default)
def _stack(call: Call) -> Padded:
    tensors, d = call.args[0], call.arg(1, 0)
    d %= len(tensors[0].dims) + 1
    one, tensors = all_aligned(call.masks, tensors)
    return Padded(call.run(tensors, d), (*one[:d], *plain([len(tensors)]), *one[d:]))


@rule(aten.unbind.int)
def _unbind(call: Call) -> tuple[Padded, ...]:
    x, d = call.args[0], call.arg(1, 0)
    d %= len(x.dims)
    if has_tail(x.dims[d]):
        raise Refused("unbound along the padded dimension: the number of results depends on the length")
    return tuple(Padded(t, x.dims[:d] + x.dims[d + 1 :]) for t in call.unchanged())


@rule(aten.diagonal.default)
def _diagonal(call: Call) -> Padded:
    x = call.args[0]
    offset, first, second = call.arg(1, 0), call.arg(2, 0) % len(x.dims), call.arg(3, 1) % len(x.dims)
    if is_padded(offset) or not (is_prefix(x.dims[first]) and is_prefix(x.dims[second])):
        raise Refused("a diagonal of merged dimensions, or one that the length places")
    kept = tuple(atoms for d, atoms in enumerate(x.dims) if d not in (first, second))
    return Padded(call.unchanged(), kept + plain(call.like.shape[-1:]))


@rule(aten.unfold.default)
def _unfold(call: Call) -> Padded:
    x, d, size, step = call.args
    if is_padded(size) or is_padded(step):
        raise Refused("a window as wide as the length")
    x = with_one_atom(call.masks, x, d % len(x.dims))
    dims = list(x.dims)
    dims[d] = plain([call.like.shape[d]])[0]
    return Padded(call.run(x, d, size, step), (*dims, *plain([size])))


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Padded:
    x = call.args[0]
    if is_padded(call.arg(1, 0)) or not all(map(is_prefix, x.dims[-2:])):
        raise Refused("a triangle of merged dimensions, or one that the length places")
    return Padded(call.unchanged(), x.dims)
