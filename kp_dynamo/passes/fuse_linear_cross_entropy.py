"""The pass `fuse_linear_cross_entropy`."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.editing import FakeRuns, cast_to, erase_unused, insert_call, replace_node
from kp_dynamo.graph.nodes import calls, fake_of, forward_nodes
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each
from kp_dynamo.passes.cross_entropy.pattern import Gradients, Head, head_at

aten, kp = torch.ops.aten, torch.ops.kp

_MEAN = 1  # the argument `reduction` of aten.nll_loss_forward: 0 is "none", 1 is "mean", 2 is "sum"
_LANES = 128  # a TPU's tile has 128 columns


@dataclass(frozen=True)
class FuseLinearCrossEntropy:
    """Compute a cross entropy from blocks of the logits: changes numerics, by rounding less often.

        before                                                  after
        mm: f32[6, 9] = aten.mm.default(x, t)                   linear_cross_entropy = kp.linear_cross_entropy(
        _log_softmax: f32[6, 9] = aten._log_softmax.default(        x, w, None, where, 128)
            mm, 1, False)                                       loss: f32[6], statistics: f32[2, 6] = ...
        nll_loss_forward = aten.nll_loss_forward.default(       sum_1: f32[] = aten.sum.default(where_1)
            _log_softmax, target, None, 1, -100)                ...

    The logits of a language model are its largest values: 2 GiB for 4096 tokens and a vocabulary of 128256. A training
    step holds up to three values of that size. The operator computes `block_bytes` of them at a time, and the backward
    computes them again from x and the weight.

    Fires on a matmul, any reshapes, slices of rows, upcasts, factors and one soft cap (tanh) of its result,
    `_log_softmax` over the last dimension and `nll_loss_forward`, as F.cross_entropy decomposes, with or without a
    bias, class weights, label smoothing and ignored targets, for every reduction, in inference and in training.

    Logits with another reader, such as a result of the graph, are computed whole for it, and the loss reads them; the
    backward is the operator's, so their gradient is never whole.

    Refuses, with the reason: logits with another reader and no gradient, where there is nothing to gain; logits with
    another gradient; log probabilities with another reader, such as an entropy; logits that are rounded, upcast to
    float64, or multiplied by more than 1e3.

    Leaves alone logits of less than `min_bytes`: computing them twice costs a matmul, and at 64 MiB modelled times are
    up to 2% longer, with 9% less memory and 8 to 11% fewer cycles.

    Attributes:
        min_bytes: The smallest logits, in float32, that are not computed whole.
        block_bytes: The size of a block of logits, in float32.
    """

    min_bytes: int = 32 << 20
    block_bytes: int = 256 << 20

    name: ClassVar[str] = "fuse_linear_cross_entropy"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        forward, runs = forward_nodes(gm.graph), FakeRuns()

        def match(loss: fx.Node) -> Head | Refusal | None:
            return head_at(loss) if self._is_large(loss) else None

        def rewrite(head: Head) -> None:
            _Rewriting(gm.graph, head, self._block(head), runs).run()

        losses = (node for node in calls(gm.graph, aten.nll_loss_forward.default) if node in forward)
        return rewrite_each(self.name, losses, match, rewrite)

    def _is_large(self, loss: fx.Node) -> bool:
        rows = fake_of(loss.args[0]).shape  # type: ignore[arg-type]
        return 4 * math.prod(hint_int(size, fallback=1) for size in rows) >= self.min_bytes

    def _block(self, head: Head) -> int:
        """Columns of a block: a multiple of the lanes, and about as many in each block."""
        num_rows, num_classes = hint_int(fake_of(head.log_softmax).shape[0], fallback=1), head.num_classes
        most = max(self.block_bytes // (4 * max(num_rows, 1)), _LANES)
        num_blocks = math.ceil(num_classes / most)
        return math.ceil(num_classes / num_blocks / _LANES) * _LANES


class _Rewriting:
    """Replaces one head by the operators."""

    def __init__(self, graph: fx.Graph, head: Head, block: int, runs: FakeRuns) -> None:
        self.graph, self.head, self.block, self.runs = graph, head, block, runs
        self.width = fake_of(head.x).shape[1]
        _, self.target, self.class_weights, self.reduction, self.ignored = head.loss.args

    def run(self) -> None:
        head = self.head
        with self.graph.inserting_before(head.loss):
            is_kept = self.insert(aten.ne.Scalar, self.target, self.ignored)
            operands = self._operands(is_kept)
            settings = head.scaling.scale, head.scaling.soft_cap, self.block
            smooth = self._smooth_weights()
            scales = self._scales(operands[-1], is_kept)
            total = self.insert(aten.sum.default, scales)
            if head.is_read:
                statistics = self._statistics()
            else:
                found = self.insert(kp.linear_cross_entropy.default, *operands, *settings, *smooth)
                loss, statistics, smooth_loss = (self.insert(operator.getitem, found, i) for i in range(3))
                self._put_loss(loss, is_kept, scales, total)
                self._put_smooth_loss(smooth_loss)
        if head.gradients is not None:
            with self.graph.inserting_before(head.gradients.chain[0]):
                grad = self._row_gradients(head.gradients.loss.args[0], is_kept, scales, total)
                smooth_grad = self._smooth_gradients(head.gradients.smooth, smooth)
                self._put_gradients(head.gradients, (grad, *operands, *settings, statistics, *smooth_grad))
        for node in (statistics, total, head.loss, *(smooth if self.class_weights is None else ())):
            erase_unused(node)

    def insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.graph, target, args, kwargs, like=self.head.chain[0], runs=self.runs)

    def _statistics(self) -> fx.Node:
        """What the backward needs of each row, from the whole logits."""
        logits = self.head.log_softmax.args[0]
        most = self.insert(aten.amax.default, logits, [1])
        exponents = self.insert(aten.exp.default, self.insert(aten.sub.Tensor, logits, self._column(most)))
        log_total = self.insert(aten.log.default, self.insert(aten.sum.dim_IntList, exponents, [1]))
        rows = [cast_to(node, self._dtype(), like=node, runs=self.runs) for node in (most, log_total)]
        return self.insert(aten.stack.default, rows)

    def _column(self, rows: fx.Node) -> fx.Node:
        return self.insert(aten.unsqueeze.default, rows, 1)

    def _operands(self, is_kept: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node]:
        """Rows of x, the weight, the bias, and targets with class 0 in place of ignored ones."""
        head, rows = self.head, self.head.x
        for node in head.chain[1:]:
            rows = self._on_rows(node, rows)
        weight = head.weight or self.insert(aten.t.default, head.columns)
        return rows, weight, head.bias, self._where(is_kept, self.target, 0)

    def _on_rows(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """What `node` does to rows of logits, done to rows of the width of x."""
        if node.target in RESHAPES:
            return self.insert(aten.reshape.default, rows, [*node.args[1][:-1], self.width])  # type: ignore[index,misc]
        if node.target is aten.slice_backward.default:
            sizes = [*node.args[1][:-1], self.width]  # type: ignore[index,misc]
            return self.insert(node.target, rows, sizes, *node.args[2:])
        if node.target is aten.slice.Tensor:
            return self.insert(node.target, rows, *node.args[1:])
        return rows  # a copy or a cast, or what the operators do: factors, tanh

    def _scales(self, target: fx.Node, is_kept: fx.Node) -> fx.Node:
        """The weight of each row in the loss: that of its class, and 0 for ignored targets."""
        if self.class_weights is None:
            return cast_to(is_kept, self._dtype(), like=self.head.chain[0], runs=self.runs)
        weights = self.insert(aten.index_select.default, self.class_weights, 0, target)
        return self._where(is_kept, cast_to(weights, self._dtype(), like=weights, runs=self.runs), 0.0)

    def _put_loss(self, losses: fx.Node, is_kept: fx.Node, scales: fx.Node, total: fx.Node) -> None:
        # An infinite loss of an ignored row must not become NaN.
        loss = self._where(is_kept, self.insert(aten.mul.Tensor, losses, scales), 0.0)
        if self.reduction:
            loss = self.insert(aten.sum.default, loss)
        if self.reduction == _MEAN:
            loss = self.insert(aten.div.Tensor, loss, total)
        for part in list(self.head.loss.users):
            value = loss if part.args[1] == 0 else total
            part.replace_all_uses_with(cast_to(value, fake_of(part).dtype, like=part, runs=self.runs))
            self.graph.erase_node(part)

    def _smooth_weights(self) -> tuple[fx.Node, ...]:
        """The argument `smooth_weights`: the class weights, or a one for each class; nothing without smoothing."""
        if self.head.smoothing is None:
            return ()
        if self.class_weights is not None:
            return (self.class_weights,)  # type: ignore[return-value]  # a tensor is a node
        return (self.insert(aten.new_full.default, self.head.x, [self.head.num_classes], 1.0, dtype=self._dtype()),)

    def _put_smooth_loss(self, smooth_loss: fx.Node) -> None:
        if self.head.smoothing is None:
            erase_unused(smooth_loss)
            return
        total = self.head.smoothing.total
        with self.graph.inserting_before(total):
            negative = self.insert(aten.neg.default, smooth_loss)
            replace_node(total, cast_to(negative, fake_of(total).dtype, like=total, runs=self.runs))

    def _smooth_gradients(self, rows: fx.Node | None, smooth: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """The arguments `smooth_weights` and `smooth_grad`, from the gradient of the sum of the log probabilities."""
        if rows is None:
            return ()
        grad = self.insert(aten.reshape.default, rows, [fake_of(rows).shape[0]])
        return (*smooth, self.insert(aten.neg.default, cast_to(grad, self._dtype(), like=grad, runs=self.runs)))

    def _row_gradients(self, grad: Any, is_kept: fx.Node, scales: fx.Node, total: fx.Node) -> fx.Node:
        grad = cast_to(grad, self._dtype(), like=grad, runs=self.runs)
        if self.reduction == _MEAN:
            grad = self.insert(aten.div.Tensor, grad, total)
        return self._where(is_kept, self.insert(aten.mul.Tensor, scales, grad), 0.0)

    def _put_gradients(self, found: Gradients, args: tuple[Any, ...]) -> None:
        all_three = self.insert(kp.linear_cross_entropy_backward.default, *args)
        d_x, d_weight, d_bias = (self.insert(operator.getitem, all_three, i) for i in range(3))
        for node in found.chain[1:]:
            d_x = self._on_rows(node, d_x)
        for node in found.d_x:
            replace_node(node, d_x)
        for node in found.d_weight:
            is_transposed = fake_of(node).shape != fake_of(d_weight).shape
            replace_node(node, self.insert(aten.t.default, d_weight) if is_transposed else d_weight)
        for node in found.d_bias:
            replace_node(node, self.insert(aten.reshape.default, d_bias, list(fake_of(node).shape)))
        for node in (d_x, d_weight, d_bias):
            erase_unused(node)

    def _where(self, is_kept: fx.Node, value: Any, other: float) -> fx.Node:
        """`value` where the target is not ignored."""
        dropped = self.insert(aten.bitwise_not.default, is_kept)
        return self.insert(aten.masked_fill.Scalar, value, dropped, other)

    def _dtype(self) -> torch.dtype:
        return compute_dtype(fake_of(self.head.x).dtype)
