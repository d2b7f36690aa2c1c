"""Look-ups and their gradients. An index in a tail is arbitrary: it reads into a tail, and it adds 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Padded, Refused, broadcast, has_tail, plain, same
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.operands import with_canonical
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.embedding.default, layouts={"indices": "..."})
def _embedding(call: Call) -> Padded:
    table, index = call.args[:2]
    # Scaling and padding_idx only affect the gradient.
    return Padded(call.run(table, call.masks.cleared(index)), (*index.dims, *table.dims[1:]))


@rule(aten.embedding_dense_backward.default, layouts={"grad_output": "..._", "indices": "..."})
def _embedding_backward(call: Call) -> Padded:
    gradient, index, num_rows, padding_idx, scales = call.args
    if scales:
        raise Refused("scale_grad_by_freq=True would count indices in the tail")
    over = range(len(index.dims))
    result = call.run(call.masks.filled(gradient, over, 0), call.masks.cleared(index), num_rows, padding_idx, False)
    return Padded(result, plain(call.like.shape))


def _all_but_self(call: Call) -> dict[str, str]:
    return {"self": with_canonical(call.args[1], len(call.args[0].dims)), "index": "i"}


@rule(aten.index_select.default, layouts=_all_but_self)
def _index_select(call: Call) -> Padded:
    x, d, index = call.args
    d %= len(x.dims)
    cleared = call.masks.cleared(index)
    return Padded(call.run(x, d, cleared), (*x.dims[:d], *index.dims, *x.dims[d + 1 :]))


def _indices(call: Call, x: Padded, given: Sequence[Padded | None]) -> list[torch.Tensor | None]:
    """Indices with 0 in their tails; negative ones count from the true end."""
    found: list[torch.Tensor | None] = []
    for d, index in enumerate(given):
        if index is None:
            found.append(None)
            continue
        if index.tensor.dtype == torch.bool:
            raise Refused("a boolean mask as an index: the number of results depends on values")
        value = call.masks.cleared(index)
        if has_tail(x.dims[d]):
            value = torch.where(value < 0, value + call.masks.true_count(x, [d]), value)
        found.append(value)
    return found


def _span(given: Sequence[Padded | None]) -> tuple[int, int]:
    places = [d for d, index in enumerate(given) if index is not None]
    if places != list(range(places[0], places[-1] + 1)):
        raise Refused("indexed dimensions that are not adjacent are unsupported")
    return places[0], places[-1] + 1


@rule(aten.index.Tensor, aten._unsafe_index.Tensor, layouts={"indices": "..."})
def _index(call: Call) -> Padded:
    x, given = call.args
    start, end = _span(given)
    looked_up = broadcast([index.dims for index in given[start:end]])
    return Padded(call.run(x, _indices(call, x, given)), (*x.dims[:start], *looked_up, *x.dims[end:]))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(call: Call) -> Padded:
    x, given, values = call.args[:3]
    adds = call.arg(3, False)
    start, end = _span(given)
    looked_up = broadcast([index.dims for index in given[start:end]])
    if any(map(has_tail, looked_up)) and not adds:
        raise Refused(
            "writing through an index that has a tail is unsupported. Allowed: x.scatter(dim, index, value) and "
            "x.index_add(dim, index, value), which skip the tail"
        )
    written = (*x.dims[:start], *looked_up, *x.dims[end:])
    full = values.tensor.expand(_shape_of(call, x, given, (start, end)))
    added = call.masks.filled(Padded(full, written), range(start, start + len(looked_up)), 0)
    return Padded(call.run(x, _indices(call, x, given), added, adds), x.dims)


def _shape_of(call: Call, x: Padded, given: Sequence[Any], span: tuple[int, int]) -> list[Any]:
    looked_up = torch.broadcast_shapes(*(index.shape for index in given[span[0] : span[1]]))
    return [*x.shape[: span[0]], *looked_up, *x.shape[span[1] :]]


def _all_but_one(call: Call) -> str:
    """The index and the indexed tensor: each is canonical along the indexed dimension."""
    return with_canonical(call.args[1], len(call.args[0].dims)) if call.args[0].dims else ""


@rule(aten.gather.default, layouts=_all_but_one)
def _gather(call: Call) -> Padded:
    x, d, index = call.args[:3]
    return Padded(call.run(x, d, call.masks.cleared(index), **call.kwargs), index.dims)


@rule(aten.scatter_add.default, layouts=_all_but_one)
def _scatter_add(call: Call) -> Any:
    x, d, index, source = call.args
    part = Padded(source.tensor[tuple(slice(0, size) for size in index.shape)], index.dims)
    return x.replaced(call.run(x, d, call.masks.cleared(index), call.masks.cleared(part)))


@rule(aten.scatter.value, aten.scatter.src, aten.scatter_reduce.two)
def _scatter(call: Call) -> Any:
    """An index in a tail writes to an extra position before the first, which is then sliced off.

    The extended tensor has enough such positions to be no shorter than the index: torch_xla 2.9 fails on a longer one.
    """
    x, d, index, *source = call.args
    d %= max(1, len(x.dims))
    others = [(a, b) for i, (a, b) in enumerate(zip(x.dims, index.dims, strict=True)) if i != d]
    if not all(same(a, b) for a, b in others):
        raise Refused("the index of a scatter is shorter than the tensor it writes to")
    if not any(map(has_tail, index.dims)):
        return x.replaced(call.unchanged())
    num = 1 if same(index.dims[d], x.dims[d]) else index.shape[d]
    longer = torch.cat([x.tensor.new_zeros([*x.shape[:d], num, *x.shape[d + 1 :]]), x.tensor], d)
    written = call.run(longer, d, call.masks.cleared(index.replaced(index.tensor + num)), *source, **call.kwargs)
    return x.replaced(written.narrow(d, num, x.shape[d]))


@rule(aten.index_add.default)
def _index_add(call: Call) -> Any:
    x, d, index, source = call.args
    d %= len(x.dims)
    added = call.masks.filled(source, [d], 0)
    return x.replaced(call.run(x, d, call.masks.cleared(index), added, **call.kwargs))
