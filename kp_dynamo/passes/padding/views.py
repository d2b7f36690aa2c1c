"""Views: the same elements under other dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import (
    Atoms,
    Dims,
    Padded,
    Refused,
    Size,
    has_tail,
    is_padded,
    is_prefix,
    plain,
    product,
    regrouped,
    same,
)
from kp_dynamo.passes.padding.masks import Masks, Number
from kp_dynamo.passes.padding.rules import Call, aten, rule


def gathered(x: torch.Tensor, d: int, index: torch.Tensor) -> torch.Tensor:
    """`x` along `d` at int64[n]; what is out of range lies in a tail, and may be anything."""
    return torch.index_select(x, d, index.clamp(min=0).clamp_max(x.shape[d] - 1))


def with_one_atom(masks: Masks, x: Padded, d: int) -> Padded:
    """`x` with its true elements first along `d`, and `d` one atom."""
    if not is_prefix(x.dims[d]):
        flat = _in_true_order(masks, x.tensor.movedim(d, 0), (x.dims[d],), [product(x.dims[d])])
        x = Padded(flat.movedim(0, d), x.dims)
    return Padded(x.tensor, (*x.dims[:d], _merged(x.dims[d]), *x.dims[d + 1 :]))


def _merged(atoms: Atoms) -> Atoms:
    return plain([product(atoms)])[0]


def viewed(masks: Masks, x: Padded, shape: Sequence[Size]) -> Padded:
    """`x` as a view of `shape`; where that splits a tail, its true elements are moved."""
    dims = regrouped(x.dims, shape)
    if dims is not None:
        return Padded(x.tensor.reshape(list(shape)), dims)
    out = plain(shape)
    kept = _num_kept(x.dims, out)
    lead, trail = x.dims[: len(x.dims) - kept], x.shape[len(x.dims) - kept :]
    source = x.tensor.reshape([product(tuple(a for atoms in lead for a in atoms)), *trail])
    moved = _in_true_order(masks, source, lead, list(shape)[: len(shape) - kept])
    return Padded(moved.reshape(list(shape)), out[: len(out) - kept] + x.dims[len(x.dims) - kept :])


def _num_kept(dims: Dims, out: Dims) -> int:
    """How many last dimensions are the same in both."""
    count = 0
    while count < min(len(dims), len(out)) and same(dims[-1 - count], out[-1 - count]):
        count += 1
    return count


def _in_true_order(masks: Masks, source: torch.Tensor, lead: Dims, shape: Sequence[Size]) -> torch.Tensor:
    """Rows of `source`, laid out as the atoms of `lead` are, in the places where a tensor of `shape` has them."""
    index: Number = 0
    for place, size in enumerate(shape):
        at = masks.positions(size).view([-1 if i == place else 1 for i in range(len(shape))])
        index = index * masks.true_value(size) + at
    assert isinstance(index, torch.Tensor)
    return gathered(source, 0, _place(masks, index, [a for atoms in lead for a in atoms]).reshape(-1))


def _place(masks: Masks, index: torch.Tensor, atoms: list[Size]) -> torch.Tensor:
    """Where the true element number `index` is, in the padded layout of `atoms`."""
    place: Any = 0
    stride: Size = 1
    for atom in reversed(atoms[1:]):
        # In float64, because torch_xla divides integers as float32.
        quotient = torch.floor(index.to(torch.float64) / masks.true_value(atom)).to(torch.int64)
        place = place + (index - quotient * masks.true_value(atom)) * stride
        index, stride = quotient, stride * atom
    return place + index * stride  # type: ignore[no-any-return]


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
    one = tensors[0].dims
    if any(not all(map(same, x.dims, one)) for x in tensors):
        raise Refused("the stacked tensors are not padded alike")
    return Padded(call.unchanged(), (*one[:d], *plain([len(tensors)]), *one[d:]))


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
