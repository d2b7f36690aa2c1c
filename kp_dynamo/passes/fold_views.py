"""The pass `fold_views`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.editing import FakeRuns, cast_to, erase_unused, insert_call
from kp_dynamo.graph.nodes import is_tangent, tensor_of
from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.layout.axes import Axes, Dim, Dims, merged
from kp_dynamo.passes.layout.strides import Strides, is_seen
from kp_dynamo.passes.layout.view_chains import End, destination_of, has_static_size, source_of

aten, kp = torch.ops.aten, torch.ops.kp

_LANES = 128
_MATRICES = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class FoldViews:
    """Let matmuls read and write values in their own shape instead of as matrices: changes only the order of sums.

        before                                                         after
        view: bf16[8, 6] = aten.view(x, [8, 6])                        contract: bf16[2, 6, 4] = kp.contract(
        addmm: bf16[8, 6] = aten.addmm(bias, view, t)                      x, weight, bias_, "abc,dc->adb")
        view_1: bf16[2, 4, 6] = aten.view(addmm, [2, 4, 6])            view: bf16[2, 2, 3, 4] = aten.view(contract, ...)
        view_2: bf16[2, 4, 2, 3] = aten.view(view_1, [2, 4, 2, 3])     transpose: bf16[2, 2, 4, 3] = aten.transpose(...)
        transpose: bf16[2, 2, 4, 3] = aten.transpose(view_2, 1, 2)

    ATen flattens the rows of a Linear to one matrix [B * S, K], and XLA keeps that form: heads computed from it have B
    and S as one innermost dimension, and every reader of [B, H, S, D] pays for a copy. A contraction over [B, S, K]
    writes them as [B, H, D, S], with S innermost, so that narrow heads leave no lane empty, and a residual sum and the
    norm after it fuse into the matmul.

    Fires on

    1. aten.mm, and aten.addmm with a bias, forward and backward, if an operand or the result is viewed in more than two
       dimensions. Both operands are traced back through views, permutations, copies and upcasts, and the result forward
       as long as it has one reader;
    2. upcast operands are read before the upcast, and the result is float32.

    If the result ends in an axis of less than 128 elements after one of at least 128, as heads do, the two are swapped
    in memory. The nodes after it get their new strides.

    Leaves alone

    3. a matmul that reads a tangent of the graph: a v5e's compiler then multiplies [4, 512, 8192] by its head's weight
       in 0.49 ms, and in 0.19 ms as a matrix with the cast to bfloat16 before it;
    4. the views of the result, if its new strides would reach an output of the graph: callers see the strides of
       outputs;
    5. integers and complex numbers; symbolic sizes and sizes of 0; views that do not split dimensions into whole parts;
       kp::linear_act.

    docs/passes.md has the measured effect.

    Attributes:
        weight_first: Whether heads are computed as weight @ x rather than x @ weight. By the compiler of a v5p a GPT
            takes 0.456 / 0.412 ms in inference then, and 0.502 / 0.428 otherwise; XLA:CPU copies x for it.
    """

    weight_first: bool = False

    name: ClassVar[str] = "fold_views"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        rewritten, strides = 0, Strides()
        for node in list(gm.graph.nodes):
            if node._erased:  # together with an earlier matmul
                continue
            strides.update(node)
            found = _contraction_of(node) if node.target in _MATRICES else None
            if found is not None:
                _put(found, strides, self.weight_first)
                rewritten += 1
        return PassReport(self.name, rewritten)


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

    def equation(self, is_swapped: bool) -> str:
        """The einsum equation; `is_swapped` exchanges the two operands."""
        letters: dict[Dim, str] = {}
        named = ["".join(letters.setdefault(g, chr(ord("a") + len(letters))) for g in term) for term in self.terms]
        first, second = reversed(named[:2]) if is_swapped else named[:2]
        return f"{first},{second}->{named[2]}"

    def shape_of(self, term: int) -> list[int]:
        return [self.axes.size_of(group) for group in self.terms[term]]


def _contraction_of(matmul: fx.Node) -> Contraction | None:
    """The contraction that can replace a matmul, or None if the matmul should stay."""
    *addend, a, b = matmul.args
    bias: Any = addend[0] if addend else None
    is_plain = not matmul.kwargs and all(map(has_static_size, (a, b, matmul)))
    if not is_plain or not matmul.meta["val"].is_floating_point() or any(map(_reads_tangent, (a, b))):
        return None
    if bias is not None and bias.meta["val"].dim() != 1:
        return None
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


def _reads_tangent(node: Any) -> bool:
    while node.target in VIEWS_AND_CASTS:
        node = node.args[0]
    return is_tangent(node)


def _may_change(found: Contraction) -> bool:
    """Whether no caller sees the strides of the result, or they stay the same."""
    value = tensor_of(found.result.node)
    return value is None or (value.is_contiguous() and not found.is_turned) or not is_seen(found.result.node)


def _put(found: Contraction, strides: Strides, weight_first: bool) -> None:
    """Replace a matmul and its views by the contraction and its views."""
    end, insert = found.result.node, _Insertion(found.matmul.graph, strides.runs)
    before = end.meta["val"]
    with found.matmul.graph.inserting_before(found.matmul):
        made = insert.matmul(found, weight_first and found.is_turned)
        for upcast in found.result.upcasts:
            made = insert.call(upcast.target, (made,), upcast.kwargs, like=upcast)
        shape = list(before.shape)
        if found.is_turned:
            made = insert.view(made, [*shape[:-2], shape[-1], shape[-2]], end)
            made = insert.call(aten.transpose.int, (made, -2, -1), {}, like=end)
        made = insert.view(made, shape, end)
    end.replace_all_uses_with(made)
    erase_unused(end)
    strides.changed(made, before)


class _Insertion:
    """Inserts nodes at the insertion point of a graph."""

    def __init__(self, graph: fx.Graph, runs: FakeRuns) -> None:
        self._runs = runs
        self.call = partial(insert_call, graph, runs=runs)

    def matmul(self, found: Contraction, is_swapped: bool) -> fx.Node:
        like = found.matmul
        dtype = like.meta["val"].dtype
        a, b = (self.view(o.node, found.shape_of(number), like) for number, o in enumerate(found.operands))
        if not all(operand.upcasts for operand in found.operands):
            a, b = (cast_to(operand, dtype, like=like, runs=self._runs) for operand in (a, b))
        options = {} if a.meta["val"].dtype == dtype else {"out_dtype": dtype}
        bias = None if found.bias is None else self.view(found.bias, _bias_shape(found), like)
        if is_swapped:
            a, b = b, a
        return self.call(kp.contract.default, (a, b, bias, found.equation(is_swapped)), options, like=like)

    def view(self, node: fx.Node, shape: list[int], like: fx.Node) -> fx.Node:
        if list(node.meta["val"].shape) == shape:
            return node
        return self.call(aten.reshape.default, (node, shape), {}, like=like)


def _bias_shape(found: Contraction) -> list[int]:
    return [found.axes.size_of(group) if group in found.columns else 1 for group in found.terms[2]]
