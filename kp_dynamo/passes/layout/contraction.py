"""Finds the contraction that a matmul of matrices computes on the values that these are views of. Edits no graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.passes.layout.axes import Axes, Dim, Dims, merged
from kp_dynamo.passes.layout.strides import is_seen
from kp_dynamo.passes.layout.view_chains import End, destination_of, has_static_size, source_of

_LANES = 128


@dataclass(frozen=True)
class Contraction:
    """A matmul of matrices, rewritten as a contraction of the values that these are views of.

    Attributes:
        matmul: The node that is replaced.
        operands: The operands of the contraction.
        bias: The addend, [N], or None.
        result: The last view of the result.
        terms: Axes of the operands and of the result, in groups that are dimensions of the contraction.
        columns: The groups that the bias has.
        axes: The axes that `terms` refers to.
        is_turned: Whether the contraction's last two dimensions are swapped to give the result.
    """

    matmul: fx.Node
    operands: tuple[End, End]
    bias: fx.Node | None
    result: End
    terms: tuple[Dims, ...]
    columns: Dims
    axes: Axes
    is_turned: bool

    @property
    def is_narrow(self) -> bool:
        """Whether the operands, before their upcasts, have fewer than 32 bits."""
        return all(fake_of(end.node).itemsize < torch.float32.itemsize for end in self.operands)

    def equation(self, is_swapped: bool) -> str:
        """The einsum equation; `is_swapped` exchanges the two operands."""
        letters: dict[Dim, str] = {}
        named = ["".join(letters.setdefault(g, chr(ord("a") + len(letters))) for g in term) for term in self.terms]
        first, second = reversed(named[:2]) if is_swapped else named[:2]
        return f"{first},{second}->{named[2]}"

    def shape_of(self, term: int) -> list[int]:
        return [self.axes.size_of(group) for group in self.terms[term]]

    def bias_shape(self) -> list[int]:
        return [self.axes.size_of(group) if group in self.columns else 1 for group in self.terms[2]]


def contraction_of(matmul: fx.Node) -> Contraction | None:
    """The contraction that can replace a matmul, or None if the matmul should stay."""
    *addend, a, b = matmul.args
    bias: Any = addend[0] if addend else None
    is_plain = not matmul.kwargs and all(map(has_static_size, (a, b, matmul)))
    if not is_plain or not matmul.meta["val"].is_floating_point():
        return None
    if bias is not None and list(bias.meta["val"].shape) != [matmul.meta["val"].shape[1]]:
        return None  # one number for all columns has no axis of theirs
    for follows_result in (True, False):
        found = _found(matmul, (a, b), bias, follows_result)  # type: ignore[arg-type]  # tensors, as is_plain says
        if found is None or _may_change(found):
            return found
    return None


def _found(
    matmul: fx.Node, operands: tuple[fx.Node, fx.Node], bias: fx.Node | None, follows_result: bool
) -> Contraction | None:
    axes = Axes()
    (rows, inner), columns = map(axes.new, operands[0].meta["val"].shape), axes.new(operands[1].meta["val"].shape[1])
    sources = source_of(operands[0], (rows, inner), axes), source_of(operands[1], (inner, columns), axes)
    result = End(matmul, (rows, columns))
    if follows_result:
        result = destination_of(matmul, result.dims, axes)
    first, second, last = (axes.flat(end.dims) for end in (*sources, result))
    is_turned = _is_narrow([axes.of(dim) for dim in result.dims], axes)
    if is_turned:
        last = (*last[:-2], last[-1], last[-2])
    terms = merged((first, second, last), apart=axes.of(rows))
    if max(map(len, terms)) < 3 or not min(map(len, terms)):
        return None
    of_bias = tuple(group for group in terms[2] if {*group} & {*axes.of(columns)})
    if bias is not None and tuple(axis for group in of_bias for axis in group) != axes.of(columns):
        return None
    return Contraction(matmul, sources, bias, result, tuple(terms), of_bias, axes, is_turned)


def _is_narrow(dims: list[Dim], axes: Axes) -> bool:
    """Whether a value ends in a narrow axis that leaves lanes empty, after one that would fill them."""
    if len(dims) < 3 or len(dims[-1]) != 1 or len(dims[-2]) != 1:
        return False
    return axes.size_of(dims[-1]) < _LANES <= axes.size_of(dims[-2])


def _may_change(found: Contraction) -> bool:
    """Whether no caller sees the strides of the result, or they stay the same."""
    value = tensor_of(found.result.node)
    return value is None or (value.is_contiguous() and not found.is_turned) or not is_seen(found.result.node)
