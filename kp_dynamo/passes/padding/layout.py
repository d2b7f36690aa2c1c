"""Changes where the true elements of a tensor are: by a gather, or without moving data if nothing has to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import (
    Atoms,
    Dims,
    Padded,
    Size,
    is_prefix,
    plain,
    product,
    regrouped,
    same,
)
from kp_dynamo.passes.padding.masks import Masks, Number


def gathered(x: torch.Tensor, d: int, index: torch.Tensor) -> torch.Tensor:
    """`x` along `d` at int64[n]; an index out of range is in a tail, and its value is arbitrary."""
    return torch.index_select(x, d, index.clamp(min=0).clamp_max(x.shape[d] - 1))


def with_one_atom(masks: Masks, x: Padded, d: int) -> Padded:
    """`x` with its true elements first along `d`, and `d` merged into one atom."""
    if not is_prefix(x.dims[d]):
        flat = _in_true_order(masks, x.tensor.movedim(d, 0), (x.dims[d],), [product(x.dims[d])])
        x = Padded(flat.movedim(0, d), x.dims)
    return Padded(x.tensor, (*x.dims[:d], _merged(x.dims[d]), *x.dims[d + 1 :]))


def _merged(atoms: Atoms) -> Atoms:
    return plain([product(atoms)])[0]


def aligned(masks: Masks, x: Padded, dims: Dims) -> Padded:
    """`x` with its true elements at the positions that `dims`, to which it broadcasts, have theirs."""
    for d in range(-1, -1 - len(x.dims), -1):
        if x.dims[d] and not same(x.dims[d], dims[d]):
            x = _moved(masks, x, d % len(x.dims), dims[d])
    return x


def _moved(masks: Masks, x: Padded, d: int, atoms: Atoms) -> Padded:
    dims = (*x.dims[:d], atoms, *x.dims[d + 1 :])
    stride = x.tensor.stride(d)
    if isinstance(stride, int) and stride == 0:  # expanded: all elements are the same
        return Padded(x.tensor, dims)
    rows = _in_true_order(masks, x.tensor.movedim(d, 0), (x.dims[d],), list(atoms))
    return Padded(rows.movedim(0, d), dims)


def viewed(masks: Masks, x: Padded, shape: Sequence[Size]) -> Padded:
    """`x` as a view of `shape`; if the view would split a tail, the true elements are moved."""
    dims = regrouped(x.dims, shape)
    if dims is not None:
        return Padded(x.tensor.reshape(list(shape)), dims)
    out = plain(shape)
    kept = _num_kept(x.dims, out)
    batch_dims, trail = x.dims[: len(x.dims) - kept], x.shape[len(x.dims) - kept :]
    source = x.tensor.reshape([product(tuple(a for atoms in batch_dims for a in atoms)), *trail])
    moved = _in_true_order(masks, source, batch_dims, list(shape)[: len(shape) - kept])
    return Padded(moved.reshape(list(shape)), out[: len(out) - kept] + x.dims[len(x.dims) - kept :])


def _num_kept(dims: Dims, out: Dims) -> int:
    """How many trailing dimensions are the same in both."""
    count = 0
    while count < min(len(dims), len(out)) and same(dims[-1 - count], out[-1 - count]):
        count += 1
    return count


def _in_true_order(masks: Masks, source: torch.Tensor, batch_dims: Dims, shape: Sequence[Size]) -> torch.Tensor:
    """Rows of `source`, moved from the layout of `batch_dims` to that of a tensor of `shape`."""
    index: Number = 0
    for place, size in enumerate(shape):
        at = masks.positions(size).view([-1 if i == place else 1 for i in range(len(shape))])
        index = index * masks.true_value(size) + at
    assert isinstance(index, torch.Tensor)
    return gathered(source, 0, _place(masks, index, [a for atoms in batch_dims for a in atoms]).reshape(-1))


def _place(masks: Masks, index: torch.Tensor, atoms: list[Size]) -> torch.Tensor:
    """The position of true element number `index` in the padded layout of `atoms`."""
    place: Any = 0
    stride: Size = 1
    for atom in reversed(atoms[1:]):
        # In float64, because torch_xla divides integers as float32.
        quotient = torch.floor(index.to(torch.float64) / masks.true_value(atom)).to(torch.int64)
        place = place + (index - quotient * masks.true_value(atom)) * stride
        index, stride = quotient, stride * atom
    return place + index * stride  # type: ignore[no-any-return]


def true_number(masks: Masks, place: torch.Tensor, atoms: Atoms) -> torch.Tensor:
    """The number of the true element at `place` of the padded layout of `atoms`."""
    number: Any = 0
    stride: Any = 1
    size: Any
    for atom in reversed(atoms):
        size = atom
        quotient = torch.floor(place.to(torch.float64) / size).to(torch.int64)  # see `_place`
        number = number + (place - quotient * size) * stride
        place, stride = quotient, stride * masks.true_value(atom)
    return number  # type: ignore[no-any-return]
