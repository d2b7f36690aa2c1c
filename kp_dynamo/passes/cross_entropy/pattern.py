"""Matches a matmul and a loss that reads one class of each row of its result, with the gradients of both.

The loss is a negative log likelihood (`targets.py`), possibly with smoothed labels. Log-sum-exps of the same logits,
those of the loss itself and of a z-loss, belong to the head too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.passes.base import Refusal
from kp_dynamo.passes.constants.values import MAX_FACTOR
from kp_dynamo.passes.cross_entropy.differences import losses_of
from kp_dynamo.passes.cross_entropy.gradients import Differs, Gradients, gradients_of, loss_part
from kp_dynamo.passes.cross_entropy.label_smoothing import Smoothing, smoothing_of
from kp_dynamo.passes.cross_entropy.log_totals import is_log_total
from kp_dynamo.passes.cross_entropy.logit_chain import Chain, Scaling, chain_to, keeps_rows, picked_rows, readers_of
from kp_dynamo.passes.cross_entropy.node_order import late_sources
from kp_dynamo.passes.cross_entropy.targets import Targets, targets_of
from kp_dynamo.passes.linear.pattern import LINEAR_MATMULS

aten = torch.ops.aten


@dataclass(frozen=True)
class Head:
    """The loss of the logits `scaled(x @ columns + bias)`, x [M, K], columns [K, V].

    Attributes:
        chain: The matmul and its successive users, to the logits of the loss.
        targets: What reads one class of each row.
        log_totals: The log-sum-exps of the same rows.
        losses: Differences of a log-sum-exp and a picked logit, with their sign (`differences.py`).
        smoothing: The sum of the log probabilities of a row, if the loss smooths its labels.
        is_read: Whether the logits have other readers, which need them whole.
    """

    x: fx.Node
    columns: fx.Node
    bias: fx.Node | None
    chain: Chain
    targets: Targets
    log_totals: tuple[fx.Node, ...] = ()
    losses: tuple[tuple[fx.Node, int], ...] = ()
    scaling: Scaling = Scaling()
    smoothing: Smoothing | None = None
    is_read: bool = False
    gradients: Gradients | None = None

    @property
    def num_classes(self) -> int:
        return int(fake_of(self.chain[-1]).shape[-1])

    @property
    def weight(self) -> fx.Node | None:
        """The weight [V, K] of which `columns` is the transpose."""
        return self.columns.args[0] if self.columns.target is aten.t.default else None  # type: ignore[return-value]

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """What the matmul reads: x, the columns, and the bias if there is one."""
        return (self.x, self.columns) if self.bias is None else (self.x, self.columns, self.bias)

    @property
    def rows(self) -> tuple[fx.Node, ...]:
        """What the operator reads besides the operands of the matmul."""
        targets = self.targets
        return (targets.index,) if targets.class_weights is None else (targets.index, targets.class_weights)

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The nodes of the forward that the operator's results replace, in graph order."""
        sums = () if self.smoothing is None else (self.smoothing.total,)
        losses = (node for node, _ in self.losses)
        return tuple(sorted((self.targets.reader, *self.log_totals, *losses, *sums)))


def head_at(reader: fx.Node, forward: set[fx.Node]) -> Head | Refusal | None:
    """The head whose targets a node of the forward reads; None if it reads no logits of a matmul."""
    targets = targets_of(reader)
    if targets is None:
        return None
    chain = chain_to(targets.logits)
    if chain[0].target not in LINEAR_MATMULS:
        return None
    *bias, x, columns = chain[0].args
    head = Head(x, columns, bias[0] if bias else None, chain, targets)  # type: ignore[arg-type]
    scaling = Scaling.of(chain)
    readers = list(readers_of(chain[0], forward))
    log_totals = tuple(sorted(node for node, path in readers if is_log_total(node) and _is_alike(path, chain)))
    if targets.log_softmax is None and not log_totals:
        return None  # a value of each row, not its probability: Q-learning
    if scaling is None or (scaling.has_tanh and scaling.after <= 0):
        return Refusal(chain[0], "the logits are multiplied by a tensor, or have two soft caps or a negative one")
    if max(abs(scaling.before), abs(scaling.after)) > MAX_FACTOR:
        return Refusal(chain[0], f"the logits are multiplied by more than {MAX_FACTOR:g}")
    if problem := _problem(head):
        return Refusal(chain[0], problem)
    losses = losses_of(reader, log_totals, forward) if targets.log_softmax is None else ()
    return _completed(replace(head, scaling=scaling, log_totals=log_totals, losses=losses), readers, forward)


def _completed(head: Head, readers: list[tuple[fx.Node, Chain]], forward: set[fx.Node]) -> Head | Refusal:
    """A head with its gradients; a refusal if the logits, or their gradient, have a part in something else."""
    targets, matmul = head.targets, head.chain[0]
    smoothing = None if targets.log_softmax is None else smoothing_of(targets.log_softmax, targets.class_weights)
    head = replace(head, smoothing=smoothing)
    try:
        parts = loss_part(targets, smoothing), head.log_totals
        gradients = gradients_of(parts, head.chain, head.scaling, head.operands)
    except Differs as difference:
        return Refusal(matmul, str(difference))
    other = _other_reader(replace(head, gradients=gradients), readers, forward)
    if other is not None and gradients is None:
        return Refusal(matmul, f"the logits are also read by {other}, and no gradient of them is computed")
    if other is None and late_sources(head.replaced[0], head.rows, head.replaced) is None:
        return Refusal(matmul, "its targets are computed from its loss, or from random numbers drawn after it")
    return replace(head, is_read=other is not None, gradients=gradients)


def _other_reader(head: Head, readers: list[tuple[fx.Node, Chain]], forward: set[fx.Node]) -> fx.Node | None:
    """What reads the logits besides the loss, the log-sum-exps and their gradients."""
    known = {head.targets.log_softmax or head.targets.reader, *head.log_totals}
    inside = frozenset[fx.Node]() if head.gradients is None else head.gradients.inside
    of_backward = [user for node in head.chain for user in node.users if user.op != "output" and user not in forward]
    others = [
        *(node for node, _ in readers if node not in known),
        *(node for node in of_backward if node not in inside),
    ]
    return next(iter(others), None)


def _is_alike(path: Chain, chain: Chain) -> bool:
    """Whether two chains from one matmul end with the same rows in the same order, scaled alike."""
    one, other = Scaling.of(path), Scaling.of(chain)
    if one is None or other is None or not one.is_close(other) or picked_rows(path) != picked_rows(chain):
        return False
    num_classes = fake_of(chain[-1]).shape[-1]
    return isinstance(num_classes, int) and all(keeps_rows(node, num_classes) for node in path)


def _problem(head: Head) -> str | None:
    logits, num_classes = fake_of(head.chain[0]), fake_of(head.chain[-1]).shape[-1]
    if not logits.dtype.is_floating_point or not isinstance(num_classes, int):
        return "the logits are complex, or have a symbolic number of classes"
    if any(scale != 1 for scale in head.chain[0].kwargs.values()):
        return "addmm with alpha or beta other than 1"
    if head.bias is not None and fake_of(head.bias).shape != (num_classes,):
        return "addmm with an addend that is not a bias of one number per class"
    for node in head.chain:
        if not keeps_rows(node, num_classes):
            return (
                f"{node.name} moves the classes from the last dimension, rounds the logits or upcasts them to float64"
            )
    return None
