"""Slices, splits, concatenations and pads. Positions counted from the end count from the true end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Dims, Padded, Refused, Size, has_tail, is_padded, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import gathered, with_one_atom
from kp_dynamo.passes.padding.masks import Masks, Number
from kp_dynamo.passes.padding.operands import with_canonical
from kp_dynamo.passes.padding.rules import aten, rule

_END = 2**63 - 1


def _with_dim(x: Padded, d: int, size: Size) -> Dims:
    """The dimensions of `x` with `size` along `d`."""
    return (*x.dims[:d], *plain([size]), *x.dims[d + 1 :])


def _is_counted_from_start(position: Size) -> bool:
    return not is_padded(position) and int(position) >= 0


def _true_position(masks: Masks, x: Padded, d: int, position: Size) -> Number:
    """A position along `d`, which may count from the end; clamped to 0."""
    value, count = masks.true_value(position), masks.true_count(x, [d])
    if isinstance(value, torch.Tensor):  # `x[:, -y.shape[1] :]`: the sign depends on the length
        value = torch.where(value < 0, value + count, value)
    elif value < 0:
        value = value + count
    return value.clamp(min=0) if isinstance(value, torch.Tensor) else max(0, value)


def _slice_along(masks: Masks, x: Padded, d: int, start: Size, size: Size, step: Size = 1) -> Padded:
    """`size` elements along `d`: every `step`-th, from `start` on."""
    x = with_one_atom(masks, x, d)
    dims = _with_dim(x, d, size)
    if _is_counted_from_start(start) and not is_padded(step):
        end = start + (size - 1) * step + 1
        return Padded(torch.ops.aten.slice.Tensor(x.tensor, d, start, end, step), dims)
    first = _true_position(masks, x, d, start)
    return Padded(gathered(x.tensor, d, first + masks.positions(size) * masks.true_value(step)), dims)


@rule(aten.slice.Tensor, layouts="...", lengths="start end step")
def _slice(call: Call) -> Padded:
    x, d = call.args[0], call.arg(1, 0) % len(call.args[0].dims)
    start, step = call.arg(2), call.arg(4, 1)
    start = 0 if start is None else start
    if not is_padded(start) and int(start) < 0 and not has_tail(x.dims[d]):
        start = max(0, int(start) + int(x.shape[d]))
    return _slice_along(call.masks, x, d, start, call.like.shape[d], step)


@rule(aten.select.int, layouts="...", lengths="index")
def _select(call: Call) -> Padded:
    x, d, index = call.args
    d %= len(x.dims)
    x = with_one_atom(call.masks, x, d)
    dims = x.dims[:d] + x.dims[d + 1 :]
    if _is_counted_from_start(index) or not (has_tail(x.dims[d]) or is_padded(index)):
        return Padded(call.run(x, d, index), dims)
    at = torch.as_tensor(_true_position(call.masks, x, d, index))
    return Padded(gathered(x.tensor, d, at.reshape(1)).squeeze(d), dims)


@rule(aten.split.Tensor, aten.split_with_sizes.default, layouts="...")
def _split(call: Call) -> tuple[Padded, ...]:
    x, d = call.args[0], call.arg(2, 0) % len(call.args[0].dims)
    pieces: list[Padded] = []
    start: Size = 0
    for like in call.like:
        pieces.append(_slice_along(call.masks, x, d, start, like.shape[d]))
        start = start + like.shape[d]
    return tuple(pieces)


def _placed(
    masks: Masks, source: Padded, d: int, start: Number, size: Size, step: Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """`source` moved to every `step`-th position from `start` on, along `d` of a tensor of `size`.

    Returns:
        The moved tensor, and a mask of its true elements that broadcasts.
    """
    source = with_one_atom(masks, source, d)
    distance = masks.positions(size) - start
    if is_padded(step) or step != 1:
        every = masks.true_value(step)
        index, is_place = torch.div(distance, every, rounding_mode="floor"), distance % every == 0
    else:
        index, is_place = distance, torch.ones((), dtype=torch.bool)
    is_there = is_place & (index >= 0) & (index < masks.true_count(source, [d]))
    mask = is_there.view([-1 if i == d else 1 for i in range(len(source.dims))])
    return gathered(source.tensor, d, index), mask


@rule(aten.slice_backward.default, layouts="...", lengths="start end step")
def _slice_backward(call: Call) -> Padded:
    gradient, sizes, d, start, _, step = call.args
    d %= len(gradient.dims)
    dims = _with_dim(gradient, d, sizes[d])
    if _is_counted_from_start(start) and not is_padded(step):
        gradient = with_one_atom(call.masks, gradient, d)
        # The tail may overlap true elements of the sliced tensor.
        cleared, size = call.masks.filled(gradient, [d], 0), gradient.shape[d]
        shape = [*cleared.shape[:d], sizes[d], *cleared.shape[d + 1 :]]
        return Padded(call.run(cleared, shape, d, start, start + (size - 1) * step + 1, step), dims)
    source = Padded(gradient.tensor, dims)
    first = _true_position(call.masks, source, d, start)
    moved, mask = _placed(call.masks, gradient, d, first, sizes[d], step)
    return Padded(torch.where(mask, moved, torch.zeros((), dtype=moved.dtype)), dims)


@rule(aten.slice_scatter.default, lengths="start end step")
def _slice_scatter(call: Call) -> Padded:
    x, source = call.args[:2]
    d, start, step = call.arg(2, 0) % len(x.dims), call.arg(3) or 0, call.arg(5, 1)
    first = _true_position(call.masks, x, d, start)
    moved, mask = _placed(call.masks, source, d, first, x.shape[d], step)
    return Padded(torch.where(mask, moved, x.tensor), x.dims)


def _is_at(call: Call, x: Padded, d: int, index: Size) -> torch.Tensor:
    """A mask of one position along `d`, which broadcasts."""
    at = call.masks.positions(x.shape[d]) == _true_position(call.masks, x, d, index)
    return at.view([-1 if i == d else 1 for i in range(len(x.dims))])


@rule(aten.select_backward.default, layouts="...", lengths="index")
def _select_backward(call: Call) -> Padded:
    gradient, sizes, d, index = call.args
    d %= len(gradient.dims) + 1
    wide = gradient.tensor.unsqueeze(d)
    dims = (*gradient.dims[:d], *plain([sizes[d]]), *gradient.dims[d:])
    target = Padded(wide.expand([*wide.shape[:d], sizes[d], *wide.shape[d + 1 :]]), dims)
    zero = torch.zeros((), dtype=wide.dtype)
    return Padded(torch.where(_is_at(call, target, d, index), wide, zero), dims)


@rule(aten.select_scatter.default, lengths="index")
def _select_scatter(call: Call) -> Padded:
    x, source, d, index = call.args
    d %= len(x.dims)
    return Padded(torch.where(_is_at(call, x, d, index), source.tensor.unsqueeze(d), x.tensor), x.dims)


def _all_but_one(call: Call) -> str:
    """Concatenated tensors: canonical along that dimension, with one layout for the others."""
    ranks = {len(x.dims) for x in call.args[0]}
    if len(ranks) > 1:
        raise Refused("concatenating tensors of different ranks is unsupported")
    return with_canonical(call.arg(1, 0), ranks.pop())


@rule(aten.cat.default, layouts=_all_but_one)
def _cat(call: Call) -> Padded:
    tensors, d = call.args[0], call.arg(1, 0)
    d %= len(tensors[0].dims)
    size = call.like.shape[d]
    joined = call.run([x.tensor for x in tensors], d)
    dims = _with_dim(tensors[0], d, size)
    if not any(has_tail(x.dims[d]) for x in tensors[:-1]):
        return Padded(joined, dims)
    return Padded(gathered(joined, d, _without_tails(call.masks, tensors, d, size)), dims)


def _without_tails(masks: Masks, tensors: Sequence[Padded], d: int, size: Size) -> torch.Tensor:
    """Positions of the true elements of the pieces in their concatenation: int64[size]."""
    position = masks.positions(size)
    index, end = position, 0
    for x in tensors[:-1]:
        length: Any = masks.true_count(x, [d])
        end = end + length
        index = index + (position >= end) * (x.shape[d] - length)
    return index


@rule(aten.constant_pad_nd.default, layouts="...")
def _constant_pad(call: Call) -> Padded:
    x, amounts, value = call.args[0], call.args[1], call.arg(2, 0)
    for number in range(len(amounts) // 2):
        d = len(x.dims) - 1 - number
        if (amounts[2 * number] or amounts[2 * number + 1]) and has_tail(x.dims[d]):
            x = with_one_atom(call.masks, x, d)
            x = x.replaced(call.masks.filled(x, [d], value))
    padded = call.run(x, amounts, value)
    untouched = len(x.dims) - len(amounts) // 2
    changed = [
        atoms if amounts[2 * (len(x.dims) - 1 - d)] == 0 == amounts[2 * (len(x.dims) - 1 - d) + 1] else
        plain([call.like.shape[d]])[0]
        for d, atoms in enumerate(x.dims) if d >= untouched
    ]  # fmt: skip
    return Padded(padded, (*x.dims[:untouched], *changed))


@rule(aten.flip.default, layouts="...")
def _flip(call: Call) -> Any:
    x, dims = call.args
    for d in (d % len(x.dims) for d in dims):
        x = with_one_atom(call.masks, x, d)
        if has_tail(x.dims[d]):
            index = call.masks.true_count(x, [d]) - 1 - call.masks.positions(x.shape[d])
            x = x.replaced(gathered(x.tensor, d, index))
        else:
            x = x.replaced(torch.flip(x.tensor, [d]))
    return x
