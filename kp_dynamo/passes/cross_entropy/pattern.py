"""Matches a matmul, a log-softmax of its rows and their negative log likelihood, with the gradients of all three.

The log-softmax may also be read by the sum of label smoothing. Between the matmul and the log-softmax may stand what
picks or reshapes rows, factors, and one tanh: the soft cap `cap * tanh(logits / cap)` of Gemma 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.graph.op_tables import DIVISIONS, MULTIPLICATIONS, RESHAPES
from kp_dynamo.ops.linear_act import fits
from kp_dynamo.passes.base import Refusal
from kp_dynamo.passes.constants.values import MAX_FACTOR, factor_of
from kp_dynamo.passes.cross_entropy.label_smoothing import Smoothing, smoothing_of, split_gradient
from kp_dynamo.passes.linear.pattern import LINEAR_MATMULS

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten._to_copy.default)
_SCALINGS = (*MULTIPLICATIONS, *DIVISIONS)
# All but the factors and tanh pick or reshape rows: the same can be done to the rows before the matmul.
_FORWARD = (*RESHAPES, *_COPIES, *_SCALINGS, aten.slice.Tensor, aten.tanh.default)
_BACKWARD = (*RESHAPES, *_COPIES, *_SCALINGS, aten.slice_backward.default, aten.tanh_backward.default)


@dataclass(frozen=True)
class Scaling:
    """Factors of the logits before a tanh and after it; without a tanh, only `before`."""

    before: float = 1.0
    after: float = 1.0
    has_tanh: bool = False

    @property
    def soft_cap(self) -> float:
        """The argument `soft_cap` of `kp::linear_cross_entropy`. 0 means that there is none."""
        return self.after if self.has_tanh else 0.0

    @property
    def scale(self) -> float:
        """The argument `scale` of `kp::linear_cross_entropy`, which divides by the soft cap before the tanh."""
        return self.before * self.after

    @classmethod
    def of(cls, nodes: Iterable[fx.Node], tanh: Any) -> Scaling | None:
        """The scaling of nodes in forward order; None for a factor that is no number, or a second tanh."""
        found = cls()
        for node in nodes:
            if node.target is tanh:
                if found.has_tanh:
                    return None
                found = replace(found, has_tanh=True)
            elif node.target in _SCALINGS:
                factor = factor_of(node)
                if factor is None:
                    return None
                name = "after" if found.has_tanh else "before"
                found = replace(found, **{name: getattr(found, name) * factor})
        return found

    def is_close(self, other: Scaling) -> bool:
        pairs = ((self.before, other.before), (self.after, other.after))
        return self.has_tanh == other.has_tanh and all(math.isclose(a, b, rel_tol=1e-12) for a, b in pairs)


@dataclass(frozen=True)
class Gradients:
    """The backward of a `Head`.

    Attributes:
        loss: aten.nll_loss_backward.
        chain: The gradient of the log-softmax and its successive users, to the gradient of the matmul's result.
        smooth: The gradient of the sum of label smoothing, one number a row.
        d_x, d_weight, d_bias: The results: the matmul with the weight; those with x, [V, K] or [K, V]; the sums.
    """

    loss: fx.Node
    chain: tuple[fx.Node, ...]
    smooth: fx.Node | None
    d_x: tuple[fx.Node, ...]
    d_weight: tuple[fx.Node, ...]
    d_bias: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Head:
    """`nll_loss(log_softmax(scaled(x @ columns + bias)))`, x [M, K], columns [K, V].

    Attributes:
        chain: The matmul and its successive users before the log-softmax.
        loss: aten.nll_loss_forward, which reads rows [N, V].
        smoothing: The sum of the log probabilities of a row, if the loss smooths its labels.
        is_read: Whether the logits have other readers, which need them whole.
    """

    x: fx.Node
    columns: fx.Node
    bias: fx.Node | None
    chain: tuple[fx.Node, ...]
    log_softmax: fx.Node
    loss: fx.Node
    scaling: Scaling = Scaling()
    smoothing: Smoothing | None = None
    is_read: bool = False
    gradients: Gradients | None = None

    @property
    def num_classes(self) -> int:
        return int(fake_of(self.log_softmax).shape[1])

    @property
    def weight(self) -> fx.Node | None:
        """The weight [V, K] of which `columns` is the transpose."""
        return self.columns.args[0] if self.columns.target is aten.t.default else None  # type: ignore[return-value]


def head_at(loss: fx.Node) -> Head | Refusal | None:
    """The head whose loss is the call `loss` of aten.nll_loss_forward; None if its logits are no matmul's."""
    log_softmax = loss.args[0]
    if not isinstance(log_softmax, fx.Node) or log_softmax.target is not aten._log_softmax.default:
        return None
    if log_softmax.args[1] not in (1, -1) or fake_of(log_softmax).dim() != 2:
        return None
    chain = tuple(reversed(list(_before(log_softmax.args[0]))))  # type: ignore[arg-type]
    if not chain or chain[0].target not in LINEAR_MATMULS:
        return None
    *bias, x, columns = chain[0].args
    head = Head(x, columns, bias[0] if bias else None, chain, log_softmax, loss)  # type: ignore[arg-type]
    scaling = Scaling.of(chain, aten.tanh.default)
    if scaling is None or (scaling.has_tanh and scaling.after <= 0):
        return Refusal(chain[0], "the logits are multiplied by a tensor, or have two soft caps or a negative one")
    if max(abs(scaling.before), abs(scaling.after)) > MAX_FACTOR:
        return Refusal(chain[0], f"the logits are multiplied by more than {MAX_FACTOR:g}")
    if problem := _problem(head):
        return Refusal(chain[0], problem)
    reader = _reader(head)
    smoothing = smoothing_of(log_softmax, loss.args[2])  # type: ignore[arg-type]
    found = _with_gradients(replace(head, scaling=scaling, smoothing=smoothing, is_read=reader is not None))
    if isinstance(found, Head) and found.is_read and found.gradients is None:
        return Refusal(chain[0], f"the logits are also read by {reader}, and no gradient of them is computed")
    return found


def _before(node: fx.Node) -> Iterator[fx.Node]:
    while node.target in _FORWARD:
        yield node
        node = node.args[0]  # type: ignore[assignment]
    yield node


def _problem(head: Head) -> str | None:
    logits, num_classes = fake_of(head.chain[0]), fake_of(head.log_softmax).shape[1]
    if not logits.dtype.is_floating_point or not isinstance(num_classes, int):
        return "the logits are complex, or have a symbolic number of classes"
    if any(scale != 1 for scale in head.chain[0].kwargs.values()):
        return "addmm with alpha or beta other than 1"
    if head.bias is not None and fake_of(head.bias).shape != (num_classes,):
        return "addmm with an addend that is not a bias of one number per class"
    for node in head.chain:
        if not _keeps_rows(node, num_classes):
            return (
                f"{node.name} moves the classes from the last dimension, rounds the logits or upcasts them to float64"
            )
    return None


def _reader(head: Head) -> fx.Node | None:
    """What reads the logits besides the loss and its gradient."""
    for node, following in zip(head.chain, (*head.chain[1:], head.log_softmax), strict=True):
        derivative = aten.tanh_backward.default if node.target is aten.tanh.default else None
        for user in node.users:
            if user is not following and user.target is not derivative:
                return user
    return None


def _keeps_rows(node: fx.Node, num_classes: int) -> bool:
    """Whether the last dimension is the classes, and the operator computes in at least the precision of the values."""
    value = fake_of(node)
    if value.dim() < 2 or value.shape[-1] != num_classes or not isinstance(value.shape[-1], int):
        return False
    if node.target is aten.slice.Tensor:
        return len(node.args) > 1 and node.args[1] not in (-1, value.dim() - 1)
    if node.target is aten._to_copy.default:
        source = fake_of(node.args[0])  # type: ignore[arg-type]
        is_exact = torch.promote_types(source.dtype, value.dtype) == value.dtype
        return is_exact and fits(value.dtype, source.dtype)
    return True


def _with_gradients(head: Head) -> Head | Refusal:
    known = (head.loss, head.smoothing and head.smoothing.reader)
    readers = [user for user in head.log_softmax.users if user not in known]
    if not readers:
        return head
    losses = [user for user in readers if user.target is aten.nll_loss_backward.default]
    softmaxes = [user for user in readers if user.target is aten._log_softmax_backward_data.default]
    if len(readers) != 2 or len(losses) != 1 or len(softmaxes) != 1:
        return Refusal(head.chain[0], f"the log probabilities are also read by {readers[-1].name}")
    parts = split_gradient(softmaxes[0].args[0], head.smoothing)  # type: ignore[arg-type]
    if parts is None or parts[0] is not losses[0]:
        return Refusal(head.chain[0], f"the gradient of the log probabilities is also read or made by {softmaxes[0]}")
    loss, smooth = parts
    if loss.args[2:6] != head.loss.args[1:5]:
        return Refusal(head.chain[0], "the gradient of another loss reads the log probabilities")
    found = _gradients(head, loss, smooth, softmaxes[0])
    return found if isinstance(found, Refusal) else replace(head, gradients=found)


def _gradients(head: Head, loss: fx.Node, smooth: fx.Node | None, softmax: fx.Node) -> Gradients | Refusal:
    chain = [softmax]
    while len(users := list(chain[-1].users)) == 1 and users[0].target in _BACKWARD:
        chain.append(users[0])
    d_logits = chain[-1]
    if any(fake_of(node).shape[-1] != head.num_classes for node in chain) or fake_of(d_logits).dim() != 2:
        return Refusal(head.chain[0], f"{d_logits.name} changes the gradient of the logits")
    scaling = Scaling.of(reversed(chain), aten.tanh_backward.default)
    tanhs = [node for node in head.chain if node.target is aten.tanh.default]
    derivatives = [user for tanh in tanhs for user in tanh.users if user in chain]
    if scaling is None or not scaling.is_close(head.scaling) or len(derivatives) != len(tanhs):
        return Refusal(head.chain[0], "the gradient of the logits is not that of their scaling")
    results: dict[str, list[fx.Node]] = {"d_x": [], "d_weight": [], "d_bias": []}
    for user in d_logits.users:
        kind = _kind(user, d_logits, head)
        if kind is None:
            return Refusal(head.chain[0], f"the gradient of the logits is also read by {user.name}")
        results[kind] += list(user.users) if user.target is aten.t.default else [user]
    return Gradients(loss, tuple(chain), smooth, **{name: tuple(nodes) for name, nodes in results.items()})


def _kind(user: fx.Node, d_logits: fx.Node, head: Head) -> str | None:
    """Which result of the backward a reader of the gradient of the logits computes."""
    if user.target is aten.sum.dim_IntList and head.bias is not None and list(user.args[1]) == [0]:  # type: ignore[arg-type]
        return "d_bias" if tensor_of(user).dtype == fake_of(head.x).dtype else None  # type: ignore[union-attr]
    if user.target is aten.t.default:
        is_weight = all(reader.target is aten.mm.default and reader.args == (user, head.x) for reader in user.users)
        return "d_weight" if is_weight else None
    if user.target is not aten.mm.default:
        return None
    first, second = user.args
    if first is d_logits and _transposes(second, head.columns):
        return "d_x"
    return "d_weight" if second is d_logits and _transposes(first, head.x) else None


def _transposes(node: object, other: fx.Node) -> bool:
    """Whether one is the transpose of the other."""
    if not isinstance(node, fx.Node):
        return False
    return any(one.target is aten.t.default and one.args[0] is two for one, two in ((node, other), (other, node)))
