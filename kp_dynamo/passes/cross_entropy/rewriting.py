"""Replaces a head and its gradients by `kp::linear_cross_entropy` and its backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.editing import FakeRuns, cast_to, erase_unused, insert_call, replace_node
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.passes.cross_entropy.differences import rest_of
from kp_dynamo.passes.cross_entropy.gradients import Gradients
from kp_dynamo.passes.cross_entropy.logit_chain import picked_rows
from kp_dynamo.passes.cross_entropy.node_order import late_sources, move_before
from kp_dynamo.passes.cross_entropy.pattern import Head

aten, kp = torch.ops.aten, torch.ops.kp

_MEAN = 1  # the argument `reduction` of aten.nll_loss_forward: 0 is "none", 1 is "mean", 2 is "sum"


class Rewriting:
    """Replaces one head by the operators."""

    def __init__(
        self, graph: fx.Graph, head: Head, block: int, runs: FakeRuns, keeps_exponentials: bool = False
    ) -> None:
        self.graph, self.head, self.block, self.runs = graph, head, block, runs
        self.keep = {"keep": True} if keeps_exponentials else {}
        self.kept: tuple[fx.Node, ...] = ()
        self.width = fake_of(head.x).shape[1]
        self.targets = head.targets
        self.is_kept: fx.Node | None = None
        self.scales: fx.Node | None = None
        self.total: fx.Node | None = None

    def run(self) -> None:
        head = self.head
        place = head.targets.reader if head.is_read else head.replaced[0]
        if not head.is_read:
            move_before(place, late_sources(place, head.rows, head.replaced) or ())
        with self.graph.inserting_before(place):
            operands = self._operands()
            settings = head.scaling.scale, head.scaling.soft_cap, self.block
            smooth = self._smooth_weights()
            self._weigh_rows(operands[-1])
            statistics = self._statistics() if head.is_read else self._put_results((*operands, *settings, *smooth))
        if head.gradients is not None:
            with self.graph.inserting_before(head.gradients.chain[-1]):
                grads = self._row_gradients(head.gradients, smooth)
                others = _with_kept(grads[1:], self.kept)
                self._put_gradients(head.gradients, (grads[0], *operands, *settings, statistics, *others))
        unused = (statistics, self.total, *head.replaced, *(smooth if self.targets.class_weights is None else ()))
        for node in unused:
            if node is not None:
                erase_unused(node)

    def insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.graph, target, args, kwargs, like=self.head.chain[0], runs=self.runs)

    def _statistics(self) -> fx.Node:
        """What the backward needs of each row, from the whole logits."""
        logits = self.head.chain[-1]
        most = self.insert(aten.amax.default, logits, [-1])
        exponents = self.insert(aten.exp.default, self.insert(aten.sub.Tensor, logits, self._column(most)))
        log_total = self.insert(aten.log.default, self.insert(aten.sum.dim_IntList, exponents, [-1]))
        rows = [self._flat(cast_to(node, self._dtype(), like=node, runs=self.runs)) for node in (most, log_total)]
        return self.insert(aten.stack.default, rows)

    def _column(self, rows: fx.Node) -> fx.Node:
        return self.insert(aten.unsqueeze.default, rows, -1)

    def _flat(self, rows: fx.Node) -> fx.Node:
        """[...], one number for each row, as [N]."""
        return rows if fake_of(rows).dim() == 1 else self.insert(aten.reshape.default, rows, [-1])

    def _operands(self) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node]:
        """Rows of x, the weight, the bias, and targets with class 0 in place of ignored ones."""
        head, rows = self.head, self.head.x
        if picked_rows(head.chain):
            for node in head.chain[1:]:
                rows = self._on_rows(node, rows)
            if fake_of(rows).dim() != 2:
                rows = self.insert(aten.reshape.default, rows, [-1, self.width])
        weight = head.weight or self.insert(aten.t.default, head.columns)
        return rows, weight, head.bias, self._target()

    def _target(self) -> fx.Node:
        targets = self.targets
        if targets.ignored is not None:
            self.is_kept = self.insert(aten.ne.Scalar, targets.index, targets.ignored)
            return self._where_kept(targets.index, 0)
        index = self._flat(targets.index)
        if targets.reader.target is aten.index.Tensor:  # a negative index counts from the last class
            index = self.insert(aten.remainder.Scalar, index, self.head.num_classes)
        return index

    def _on_rows(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """What `node` does to rows of logits, done to rows of the width of x."""
        if node.target in RESHAPES:
            return self.insert(aten.reshape.default, rows, [*node.args[1][:-1], self.width])  # type: ignore[index,misc]
        if node.target is aten.slice_backward.default:
            sizes = [*node.args[1][:-1], self.width]  # type: ignore[index,misc]
            return self.insert(node.target, rows, sizes, *node.args[2:])
        if node.target is aten.slice.Tensor:
            return self.insert(node.target, rows, *node.args[1:])
        return rows  # a copy or a cast, a sum of gradients, or what the operators do: factors, tanh

    def _weigh_rows(self, target: fx.Node) -> None:
        """The weight of each row in nll_loss, that of its class and 0 for ignored targets, and their sum."""
        if self.is_kept is None:
            return
        weights = self.targets.class_weights
        if weights is None:
            self.scales = cast_to(self.is_kept, self._dtype(), like=self.head.chain[0], runs=self.runs)
        else:
            chosen = self.insert(aten.index_select.default, weights, 0, target)
            chosen = cast_to(chosen, self._dtype(), like=chosen, runs=self.runs)
            self.scales = self._where_kept(chosen, 0.0)
        self.total = self.insert(aten.sum.default, self.scales)

    def _put_results(self, args: tuple[Any, ...]) -> fx.Node:
        """Replace the results of the head; returns the statistics of its rows."""
        found = self.insert(kp.linear_cross_entropy.default, *args, **self.keep)
        loss, statistics, smooth_loss = (self.insert(operator.getitem, found, i) for i in range(3))
        if self.keep:
            self.kept = self.insert(operator.getitem, found, 3), loss
        if self.targets.is_pick:
            self._put_picked(loss, statistics)
        else:
            self._put_loss(loss)
        for node in self.head.log_totals:
            self._put(node, self._log_total(statistics))
        self._put_smooth_loss(smooth_loss)
        if not self.kept:
            erase_unused(loss)
        return statistics

    def _put_loss(self, losses: fx.Node) -> None:
        # An infinite loss of an ignored row must not become NaN.
        loss = self._where_kept(self.insert(aten.mul.Tensor, losses, self.scales), 0.0)
        if self.targets.reduction:
            loss = self.insert(aten.sum.default, loss)
        if self.targets.reduction == _MEAN:
            loss = self.insert(aten.div.Tensor, loss, self.total)
        for part in list(self.targets.reader.users):
            value = loss if part.args[1] == 0 else self.total
            part.replace_all_uses_with(cast_to(value, fake_of(part).dtype, like=part, runs=self.runs))  # type: ignore[arg-type]
            self.graph.erase_node(part)

    def _put_picked(self, loss: fx.Node, statistics: fx.Node) -> None:
        """Replace the values that a reader picks: log probabilities, or the logits themselves."""
        reader = self.targets.reader
        if self.targets.log_softmax is not None:
            self._put(reader, loss if self.targets.sign < 0 else self.insert(aten.neg.default, loss))
            return
        for difference, sign in self.head.losses:
            self._put(difference, loss if sign > 0 else self.insert(aten.neg.default, loss))
        if reader.users:
            self._put(reader, self.insert(aten.sub.Tensor, self._log_total(statistics), loss))

    def _log_total(self, statistics: fx.Node) -> fx.Node:
        return self.insert(aten.sum.dim_IntList, statistics, [0])

    def _put(self, node: fx.Node, rows: fx.Node) -> None:
        """Replace a node, one number for each row in any shape, by the rows [N]."""
        if fake_of(node).dim() != 1:
            rows = self.insert(aten.reshape.default, rows, self._sizes(node))
        node.replace_all_uses_with(cast_to(rows, fake_of(node).dtype, like=node, runs=self.runs))

    def _sizes(self, node: fx.Node) -> list[Any]:
        """The sizes of a value of the rows. Symbolic ones are those of the logits, which it has but for the last."""
        sizes, logits = list(fake_of(node).shape), self.head.chain[-1]
        for dim, size in enumerate(sizes):
            if not isinstance(size, int):
                sizes[dim] = self.insert(aten.sym_size.int, logits, dim)
        return sizes

    def _smooth_weights(self) -> tuple[fx.Node, ...]:
        """The argument `smooth_weights`: the class weights, or a one for each class; nothing without smoothing."""
        if self.head.smoothing is None:
            return ()
        if self.targets.class_weights is not None:
            return (self.targets.class_weights,)
        return (self.insert(aten.new_full.default, self.head.x, [self.head.num_classes], 1.0, dtype=self._dtype()),)

    def _put_smooth_loss(self, smooth_loss: fx.Node) -> None:
        if self.head.smoothing is None:
            erase_unused(smooth_loss)
            return
        self._put(self.head.smoothing.total, self.insert(aten.neg.default, smooth_loss))

    def _row_gradients(self, found: Gradients, smooth: tuple[fx.Node, ...]) -> tuple[fx.Node | None, ...]:
        """The arguments `grad`, `smooth_weights`, `smooth_grad` and `lse_grad`, without unused ones at the end."""
        grad, rest = self._loss_gradient(found), self._log_total_gradient(found)
        smooth_args = self._smooth_gradients(None if found.loss is None else found.loss.smooth, smooth)
        if rest is None:
            return (grad, *smooth_args)
        return (grad, *(smooth_args or (None, None)), rest)

    def _loss_gradient(self, found: Gradients) -> fx.Node:
        """The gradient of the loss of each row."""
        if found.loss is None:
            return self.insert(aten.zeros_like.default, self._as_rows(found.log_totals[0].rows))
        grad = cast_to(found.loss.rows, self._dtype(), like=found.loss.rows, runs=self.runs)
        if self.targets.is_pick:
            grad = self._flat(grad)
            return grad if found.loss.sign > 0 else self.insert(aten.neg.default, grad)
        if self.targets.reduction == _MEAN:
            grad = self.insert(aten.div.Tensor, grad, self.total)
        return self._where_kept(self.insert(aten.mul.Tensor, self.scales, grad), 0.0)

    def _log_total_gradient(self, found: Gradients) -> fx.Node | None:
        """The gradient of the log-sum-exps of each row, besides those that a loss is computed from."""
        total: fx.Node | None = None
        is_cancelled = self.targets.log_softmax is None
        for part in rest_of(found.loss, found.log_totals) if is_cancelled else found.log_totals:
            rows = self._as_rows(part.rows)
            total = rows if total is None else self.insert(aten.add.Tensor, total, rows)
        return total

    def _as_rows(self, rows: fx.Node) -> fx.Node:
        return self._flat(cast_to(rows, self._dtype(), like=rows, runs=self.runs))

    def _smooth_gradients(self, rows: fx.Node | None, smooth: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """The arguments `smooth_weights` and `smooth_grad`, from the gradient of the sum of the log probabilities."""
        if rows is None:
            return ()
        grad = self.insert(aten.reshape.default, rows, [-1])
        return (*smooth, self.insert(aten.neg.default, cast_to(grad, self._dtype(), like=grad, runs=self.runs)))

    def _put_gradients(self, found: Gradients, args: tuple[Any, ...]) -> None:
        all_three = self.insert(kp.linear_cross_entropy_backward.default, *args)
        d_x, d_weight, d_bias = (self.insert(operator.getitem, all_three, i) for i in range(3))
        d_x = self._of_all_rows(found, d_x)
        for node in found.d_x:
            replace_node(node, d_x)
        for node in found.d_weight:
            is_transposed = fake_of(node).shape != fake_of(d_weight).shape
            replace_node(node, self.insert(aten.t.default, d_weight) if is_transposed else d_weight)
        for node in found.d_bias:
            replace_node(node, self.insert(aten.reshape.default, d_bias, list(fake_of(node).shape)))
        for node in (d_x, d_weight, d_bias):
            erase_unused(node)

    def _of_all_rows(self, found: Gradients, d_x: fx.Node) -> fx.Node:
        """The gradient of x from that of the picked rows."""
        if not picked_rows(found.chain):
            return d_x
        first = fake_of(found.chain[0])
        if first.dim() != 2:
            d_x = self.insert(aten.reshape.default, d_x, [*first.shape[:-1], self.width])
        for node in found.chain[1:]:
            d_x = self._on_rows(node, d_x)
        return d_x

    def _where_kept(self, value: Any, other: float) -> fx.Node:
        """`value` where the target is not ignored."""
        dropped = self.insert(aten.bitwise_not.default, self.is_kept)
        return self.insert(aten.masked_fill.Scalar, value, dropped, other)

    def _dtype(self) -> torch.dtype:
        return compute_dtype(fake_of(self.head.x).dtype)


def _with_kept(given: tuple[Any, ...], kept: tuple[fx.Node, ...]) -> tuple[Any, ...]:
    """The last arguments of the backward: `smooth_weights`, `smooth_grad`, `lse_grad`, and what the forward keeps."""
    return (*given, *([None] * (3 - len(given))), *kept) if kept else given
