"""The pass `fold_views`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.editing import FakeRuns, cast_to, erase_unused, insert_call
from kp_dynamo.graph.nodes import fake_of, is_tangent
from kp_dynamo.graph.op_tables import VIEWS
from kp_dynamo.graph.waiting import insert_wait
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.layout.contraction import Contraction, contraction_of
from kp_dynamo.passes.layout.strides import Strides
from kp_dynamo.passes.layout.view_chains import End

aten, kp = torch.ops.aten, torch.ops.kp

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
    2. upcast operands are read before the upcast, and the result is float32;
    3. an operand that is a tangent of the graph, cast to fewer bits, too: an optimization barrier keeps the cast apart.
       A v5e's compiler otherwise fuses it into the matmul, and multiplies [4, 512, 8192] by its head's weight in 0.49
       instead of 0.19 ms.

    If the result ends in an axis of less than 128 elements after one of at least 128, as heads do, the two are swapped
    in memory. The nodes after it get their new strides.

    Leaves alone

    4. the views of the result, if its new strides would reach an output of the graph: callers see the strides of
       outputs;
    5. operands of 32 bits and more, unless float32 matmuls take one pass over the matrix unit: torch_xla lowers no
       contraction with more passes;
    6. integers and complex numbers; symbolic sizes and sizes of 0; views that do not split dimensions into whole parts;
       an addend that is not a bias of shape [N]; kp::linear_act.

    docs/measurements.md has the measured effect.

    Attributes:
        weight_first: Whether heads are computed as weight @ x rather than x @ weight. By the compiler of a v5p a GPT
            takes 0.456 / 0.412 ms in inference then, and 0.502 / 0.428 otherwise; XLA:CPU copies x for it.
        float32_in_one_pass: Whether the matmul precision is "default".
    """

    weight_first: bool = False
    float32_in_one_pass: bool = False

    name: ClassVar[str] = "fold_views"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        rewritten, strides = 0, Strides()
        for node in list(gm.graph.nodes):
            if node._erased:  # together with an earlier matmul
                continue
            strides.update(node)
            found = contraction_of(node) if node.target in _MATRICES else None
            if found is not None and (self.float32_in_one_pass or found.is_narrow):
                _put(found, strides, self.weight_first)
                _keep_apart(found.operands)
                rewritten += 1
        return PassReport(self.name, rewritten)


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


def _keep_apart(operands: tuple[End, End]) -> None:
    """Make the readers of an operand that is a tangent, cast to fewer bits, wait for it."""
    for cast in (operand.node for operand in operands):
        if not _is_narrowed_tangent(cast):
            continue
        with cast.graph.inserting_before(cast.next):
            [kept] = insert_wait(cast.graph, kp.wait_for_all.default, [cast])
        cast.replace_all_uses_with(kept, delete_user_cb=lambda user: user.target is not kp.wait_for_all.default)


def _is_narrowed_tangent(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    source = node.all_input_nodes[0]
    while source.target in VIEWS:
        source = source.all_input_nodes[0]
    return is_tangent(source) and fake_of(source).itemsize > fake_of(node).itemsize


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
        bias = None if found.bias is None else self.view(found.bias, found.bias_shape(), like)
        if is_swapped:
            a, b = b, a
        return self.call(kp.contract.default, (a, b, bias, found.equation(is_swapped)), options, like=like)

    def view(self, node: fx.Node, shape: list[int], like: fx.Node) -> fx.Node:
        if list(node.meta["val"].shape) == shape:
            return node
        return self.call(aten.reshape.default, (node, shape), {}, like=like)
