"""Finds the nodes of a joint graph that compute the gradients of a head. Does not edit the graph.

Autograd adds the gradients that the loss and the log-sum-exps send to the logits, and multiplies the sum with the
operands of the matmul.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.passes.cross_entropy.label_smoothing import Smoothing, split_gradient
from kp_dynamo.passes.cross_entropy.log_totals import log_total_gradients
from kp_dynamo.passes.cross_entropy.logit_chain import BACKWARD, Chain, Scaling, picked_rows
from kp_dynamo.passes.cross_entropy.targets import Targets, scattered, sign_of, signs_and_views

aten = torch.ops.aten


class Differs(Exception):
    """The backward is not in autograd's form; the text is the reason."""


@dataclass(frozen=True)
class Part:
    """What one reader of the logits adds to their gradient.

    Attributes:
        d_logits: The gradient.
        inside: The nodes that only compute it.
        rows: The gradient of the reader: that of a loss, of the picked values [..., 1] or [N], or of a log-sum-exp.
        smooth: The gradient of the sum of label smoothing, [N, 1], or None.
        sign: The sign of `rows` as the gradient of a loss.
    """

    d_logits: fx.Node
    inside: tuple[fx.Node, ...]
    rows: fx.Node
    smooth: fx.Node | None = None
    sign: int = 1


@dataclass(frozen=True)
class Gradients:
    """The backward of a head.

    Attributes:
        loss: What its loss adds to the gradient of the logits; None if only log-sum-exps have a gradient.
        log_totals: What log-sum-exps add to it.
        chain: The gradient of one of them and its successive users, to the gradient of the matmul's result.
        inside: All nodes that compute that gradient.
        d_x, d_weight, d_bias: The results: the matmul with the weight; those with x, [V, K] or [K, V]; the sums.
    """

    loss: Part | None
    log_totals: tuple[Part, ...]
    chain: Chain
    inside: frozenset[fx.Node]
    d_x: tuple[fx.Node, ...]
    d_weight: tuple[fx.Node, ...]
    d_bias: tuple[fx.Node, ...]


def loss_part(targets: Targets, smoothing: Smoothing | None) -> Part | None:
    """The gradient that the reader of the targets sends to the logits, or None."""
    if targets.log_softmax is None:
        return _picked_logits(targets)
    known = {targets.reader, *targets.between, smoothing and smoothing.reader}
    readers = [user for user in targets.log_softmax.users if user not in known]
    readers = [user for user in readers if user.target is not aten.nll_loss_backward.default]
    if not readers:
        return None
    softmax = readers[0]
    if len(readers) > 1 or softmax.target is not aten._log_softmax_backward_data.default:
        raise Differs(f"the log probabilities are also read by {readers[-1].name}")
    return _picked_softmax(targets, softmax) if targets.is_pick else _nll_part(targets, smoothing, softmax)


def _nll_part(targets: Targets, smoothing: Smoothing | None, softmax: fx.Node) -> Part:
    parts = split_gradient(softmax.args[0], smoothing)  # type: ignore[arg-type]  # it is a tensor
    if parts is None:
        raise Differs(f"the gradient of the log probabilities is also read or made by {softmax}")
    loss, smooth = parts
    if loss.args[1:6] != (targets.log_softmax, *targets.reader.args[1:5]):
        raise Differs("the gradient of another loss reads the log probabilities")
    return Part(softmax, (loss,), loss.args[0], smooth)  # type: ignore[arg-type]


def _picked_softmax(targets: Targets, softmax: fx.Node) -> Part:
    between, scatter = signs_and_views(softmax.args[0])
    rows = scattered(scatter, targets.index)
    if rows is None or any(len(node.users) != 1 for node in (*between, scatter)):
        raise Differs(f"the gradient of the log probabilities is also read or made by {softmax}")
    # The loss is the negative log probability.
    return Part(softmax, (*between, scatter), rows, sign=-sign_of(between))


def _picked_logits(targets: Targets) -> Part | None:
    found = [(user, scattered(user, targets.index)) for user in targets.index.users]
    parts = [Part(user, (), rows, sign=-1) for user, rows in found if rows is not None]
    if len(parts) > 1:
        raise Differs("two gradients are sent to the logits of its targets")
    return parts[0] if parts else None


def gradients_of(
    parts: tuple[Part | None, Iterable[fx.Node]], chain: Chain, scaling: Scaling, operands: tuple[fx.Node, ...]
) -> Gradients | None:
    """The backward of a head, or None if it has none.

    Args:
        parts: What the loss adds to the gradient of the logits, and the log-sum-exps.
        chain: The chain of the head.
        scaling: The scaling of the logits.
        operands: x, the columns, and the bias if there is one.

    Raises:
        Differs: The gradient of the logits has other parts, or goes elsewhere.
    """
    loss, log_totals = parts
    others = tuple(
        Part(found.d_logits, found.inside, found.rows) for node in log_totals for found in log_total_gradients(node)
    )
    every = (*(() if loss is None else (loss,)), *others)
    if not every:
        return None
    paths = [_path(part.d_logits) for part in every]
    _check(paths, chain, scaling)
    results: dict[str, list[fx.Node]] = {"d_x": [], "d_weight": [], "d_bias": []}
    d_logits = paths[0][-1]
    for user in d_logits.users:
        kind = _kind(user, d_logits, operands)
        if kind is None:
            raise Differs(f"the gradient of the logits is also read by {user.name}")
        results[kind] += list(user.users) if user.target is aten.t.default else [user]
    inside = frozenset(node for nodes in (*paths, *(part.inside for part in every)) for node in nodes)
    return Gradients(loss, others, paths[0], inside, **{name: tuple(nodes) for name, nodes in results.items()})


def _path(d_logits: fx.Node) -> Chain:
    """A gradient and its successive users, up to the one that several nodes read."""
    nodes = [d_logits]
    while len(users := list(nodes[-1].users)) == 1 and (users[0].target in BACKWARD or _adds(users[0])):
        nodes.append(users[0])
    return tuple(nodes)


def _adds(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and len(set(node.args)) == 2


def _check(paths: list[Chain], chain: Chain, scaling: Scaling) -> None:
    """Raise unless the paths are all of the gradient of the matmul's result, and mirror its chain."""
    num_classes, last = fake_of(chain[-1]).shape[-1], paths[0][-1]
    known = {node for path in paths for node in path}
    for path in paths:
        if path[-1] is not last:
            raise Differs(f"the gradient of the logits is also read by {next(iter(path[-1].users), path[-1])}")
        if any(fake_of(node).shape[-1] != num_classes for node in path) or fake_of(last).dim() != 2:
            raise Differs(f"{last.name} changes the gradient of the logits")
        found = Scaling.of(reversed(path[1:]), aten.tanh_backward.default)
        if found is None or not found.is_close(scaling) or picked_rows(reversed(path)) != picked_rows(chain):
            raise Differs("the gradient of the logits is not that of their scaling")
        _check_soft_cap(path, chain)
    for node in known:
        if _adds(node) and not set(node.args) <= known:
            raise Differs(f"the gradient of the logits is also made by {next(n for n in node.args if n not in known)}")


def _check_soft_cap(path: Chain, chain: Chain) -> None:
    derivatives = [node for node in path if node.target is aten.tanh_backward.default]
    caps = {node.args[0]: node for node in chain if node.target is aten.tanh.default}
    for node in derivatives:
        tanh = node.args[1]
        if not isinstance(tanh, fx.Node) or tanh.target is not aten.tanh.default or tanh.args[0] not in caps:
            raise Differs("the gradient of the logits is not that of their scaling")


def _kind(user: fx.Node, d_logits: fx.Node, operands: tuple[Any, ...]) -> str | None:
    """Which result of the backward a reader of the gradient of the logits computes."""
    x, columns, *bias = operands
    if user.target is aten.sum.dim_IntList and bias and list(user.args[1]) == [0]:  # type: ignore[arg-type]
        return "d_bias" if tensor_of(user).dtype == fake_of(x).dtype else None  # type: ignore[union-attr]
    if user.target is aten.t.default:
        is_weight = all(reader.target is aten.mm.default and reader.args == (user, x) for reader in user.users)
        return "d_weight" if is_weight else None
    if user.target is not aten.mm.default:
        return None
    first, second = user.args
    if first is d_logits and _transposes(second, columns):
        return "d_x"
    return "d_weight" if second is d_logits and _transposes(first, x) else None


def _transposes(node: object, other: fx.Node) -> bool:
    """Whether one is the transpose of the other."""
    if not isinstance(node, fx.Node):
        return False
    return any(one.target is aten.t.default and one.args[0] is two for one, two in ((node, other), (other, node)))
