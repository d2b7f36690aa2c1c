"""Finds the nodes of a joint graph that compute the gradients of an attention. Does not edit the graph.

Autograd always generates the same form. With w the probabilities and g the gradient of the result:

    d_v = w^T g,    d_w = g v^T,    d_s = softmax's backward of d_w, masked and scaled,    d_q = d_s k,    d_k = q^T d_s
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS
from kp_dynamo.passes.attention.gradient_nodes import Choice, choice_of, is_transposed, transposes, unviewed
from kp_dynamo.passes.attention.learned_bias import (
    BiasGradient,
    OneSequence,
    bias_gradient,
    of_one_sequence,
    reads_shape_alone,
)
from kp_dynamo.passes.attention.pattern import Attention
from kp_dynamo.passes.attention.score_layout import layout_problem
from kp_dynamo.passes.attention.sinks import sink_gradient, without_sink_column
from kp_dynamo.passes.base import Refusal
from kp_dynamo.passes.constants.values import factor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Gradients:
    """The backward of one attention.

    Attributes:
        grad: The gradient of the result, as the matmuls read it, [N, S, E].
        d_q: The matmul that gives the gradient of q, or None if it is not needed.
        d_k: The same for k, [N, D, T].
        d_v: The same for v.
        inside: The nodes between `grad` and these.
        bias: How the gradient of the scores reaches a learned bias, or None.
        sinks: The gradient of the sinks, [..., S, 1], or None.
    """

    grad: fx.Node
    d_q: fx.Node | None
    d_k: fx.Node | None
    d_v: fx.Node | None
    inside: frozenset[fx.Node]
    bias: BiasGradient | OneSequence | None = None
    sinks: fx.Node | None = None

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        return self.d_q, self.d_k, self.d_v


def gradients_of(found: Attention, backward: set[fx.Node]) -> Gradients | Refusal | None:
    """The backward of an attention, or None if the graph has none.

    Refused is a backward that differs from autograd's form, or that reads values that the rewrite would remove.
    """
    readers = [u for node in found.inside for u in node.users if u in backward]
    if not readers:
        return None
    search = _Search(found, backward)
    try:
        gradients = search.run()
    except _Differs as difference:
        return Refusal(found.softmax, str(difference))
    problem = _problem(found, gradients, search.steps)
    return gradients if problem is None else Refusal(found.softmax, problem)


class _Differs(Exception):
    """The backward is not in autograd's form. Ends the search; `gradients_of` returns it as a `Refusal`."""


@dataclass
class _Steps:
    """The scale, the soft caps and the masks between the softmax's backward and d_s."""

    scale: float = 1.0
    num_caps: int = 0
    masks: list[Choice] = field(default_factory=list)


class _Search:
    """Finds the nodes of one backward."""

    def __init__(self, found: Attention, backward: set[fx.Node]) -> None:
        self.found, self.backward = found, backward
        self.steps: _Steps | None = _Steps()
        self.inside: set[fx.Node] = set()
        self.bias: BiasGradient | OneSequence | None = None
        self.sinks: fx.Node | None = None

    def run(self) -> Gradients:
        v = self.found.second.args[1]
        d_v = self._matmul_of_transposed(self.found.weights, first=True)
        softmax_backward = self._softmax_backward()
        if softmax_backward is None:
            return self._of_values_alone(d_v)
        d_w = self._gradient_of_weights(softmax_backward.args[0])
        if not isinstance(d_w, fx.Node) or d_w.target is not aten.bmm.default or not is_transposed(d_w.args[1], v):
            raise _Differs("the gradient of its probabilities is not a matmul with its values")
        grad = d_w.args[0]
        if d_v is not None and d_v.args[1] is not grad:
            raise _Differs("the backward reads two gradients of its result")
        self.inside |= {softmax_backward, d_w}
        d_q, d_k = self._score_matmuls(self._without_sinks(softmax_backward))
        if self.bias is not None and self.sinks is not None:
            raise _Differs("both its sinks and a bias have a gradient")
        return Gradients(grad, d_q, d_k, d_v, frozenset(self.inside), self.bias, self.sinks)  # type: ignore[arg-type]

    def _without_sinks(self, gradient: fx.Node) -> fx.Node:
        """The gradient of the scores, from that of the scores and the sinks."""
        if self.found.sinks is None:
            return gradient
        parts = sink_gradient(self.found.sinks, gradient)
        if parts is None or parts.d_scores is None:
            raise _Differs("the gradient of its scores and sinks is not divided into both")
        self.inside |= {*parts.inside, parts.d_scores}
        self.sinks = parts.d_sinks
        return parts.d_scores

    def _gradient_of_weights(self, node: Any) -> Any:
        """The gradient of the second matmul's operand, from that of the softmax's result."""
        dropout = self.found.dropout
        if self.found.sinks is not None:
            inner = without_sink_column(node, self.found.sinks)
            if inner is None:
                raise _Differs("the gradient of its probabilities is not 0 for the sinks")
            self.inside.add(node)
            node = inner
        while isinstance(node, fx.Node):
            if node.target in VIEWS_AND_CASTS:
                self._check_layout(node, node.args[0])
                self.inside.add(node)
                node = node.args[0]
            elif dropout is not None and (found := dropout.source_of(node)):
                node, seen = found
                self.inside |= seen
                dropout = None
            else:
                break
        if dropout is not None:
            raise _Differs("the gradient of its probabilities has another dropout than the probabilities")
        return node

    def _of_values_alone(self, d_v: fx.Node | None) -> Gradients:
        if d_v is None or not isinstance(d_v.args[1], fx.Node):
            raise _Differs("its probabilities have no softmax backward")
        self.steps = None
        return Gradients(d_v.args[1], None, None, d_v, frozenset(self.inside))

    def _softmax_backward(self) -> fx.Node | None:
        sources = [n for n in self.found.inside if n is self.found.softmax or n.target is aten.where.self]
        found = [
            u for n in sources for u in n.users
            if u in self.backward and u.target is aten._softmax_backward_data.default and u.args[1] is n
        ]  # fmt: skip
        return found[0] if len(found) == 1 else None

    def _score_matmuls(self, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """d_q and d_k, after the masks and factors that `node` goes through."""
        q, k = self.found.q, self.found.k
        while True:
            users = self._readers(node)
            matmuls = [u for u in users if u.target is aten.bmm.default]
            if matmuls and len(matmuls) == len(users):
                d_q = next((u for u in matmuls if u.args[0] is node and is_transposed(u.args[1], k)), None)
                d_k = next((u for u in matmuls if u.args[1] is node and is_transposed(u.args[0], q)), None)
                if len(matmuls) != len([d for d in (d_q, d_k) if d is not None]):
                    raise _Differs("another matmul reads the gradient of its scores")
                return d_q, d_k
            if len(users) != 1:
                names = ", ".join(u.name for u in users)
                raise _Differs(f"{names} also read the gradient of its scores: a learned mask?")
            node = self._step(node, users[0])

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """What reads the values of a gradient of scores, without a learned bias."""
        readers = []
        for user in node.users:
            if reads_shape_alone(user, node):
                self.inside.add(user)
            elif (bias := self._bias_at(node, user)) is not None:
                self.bias = bias
            else:
                readers.append(user)
        others = tuple(reader for reader in readers if not self._leads_to_matmuls(reader))
        if others and len(others) < len(readers) and self._may_have_bias():
            self.bias = of_one_sequence(node, others, self.found.batch_dims)
        return readers if self.bias is None else [reader for reader in readers if reader not in self.bias.readers]

    def _bias_at(self, node: fx.Node, user: fx.Node) -> BiasGradient | None:
        """The gradient of a learned bias, if `user` sums it."""
        return bias_gradient(node, user, self.found.batch_dims) if self._may_have_bias() else None

    def _may_have_bias(self) -> bool:
        """Whether the gradient of a learned bias can start here: only after all masks, before any factor or cap."""
        assert self.steps is not None, "scores have a gradient"
        num_masks = sum(mask.fill is not None for mask in self.found.masks)
        is_unscaled = self.steps.scale == 1 and not self.steps.num_caps
        return self.bias is None and is_unscaled and len(self.steps.masks) == num_masks

    def _leads_to_matmuls(self, node: fx.Node) -> bool:
        """Whether a gradient of scores, at a reader of another one, goes on to a matmul with queries or keys."""
        if node.target is aten.bmm.default:
            q, k = self.found.q, self.found.k
            return is_transposed(node.args[1], k) or is_transposed(node.args[0], q)
        others = aten.copy.default, aten.where.self, aten.masked_fill.Scalar, aten.tanh_backward.default
        goes_on = node.target in (*VIEWS_AND_CASTS, *others)
        return (goes_on or factor_of(node) is not None) and any(map(self._leads_to_matmuls, node.users))

    def _step(self, node: fx.Node, user: fx.Node) -> fx.Node:
        assert self.steps is not None, "scores have a gradient"
        factor = factor_of(user) if user.args[0] is node else None
        choice = choice_of(user, node)
        if factor is not None:
            self.steps.scale *= factor
        elif choice is not None:
            self.steps.masks.append(choice)
        elif self._is_of_soft_cap(user, node):
            self.steps.num_caps += 1
        elif user.target not in (*VIEWS_AND_CASTS, aten.copy.default):
            raise _Differs(f"the gradient of its scores passes through {user.target}")
        else:
            self._check_layout(user, node)
        self.inside.add(user)
        return user

    def _is_of_soft_cap(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether a node is the derivative of the soft cap of the scores."""
        is_derivative = user.target is aten.tanh_backward.default and user.args[0] is node
        return is_derivative and user.args[1] in self.found.inside

    def _check_layout(self, node: fx.Node, source: Any) -> None:
        """Gradients keep the layout of the scores; the backward of an `autograd.Function` may transpose them."""
        if (problem := layout_problem(node, source, self.found.first)) is not None:
            raise _Differs(f"in the backward, {problem}")

    def _matmul_of_transposed(self, node: fx.Node, first: bool) -> fx.Node | None:
        """A backward matmul with `node` transposed as its first operand."""
        for transposed in transposes(node):
            for user in transposed.users:
                if user in self.backward and user.target is aten.bmm.default and user.args[0] is transposed:
                    self.inside.add(transposed)
                    return user
        return None


def _problem(found: Attention, gradients: Gradients, steps: _Steps | None) -> str | None:
    """Why the operator cannot compute these gradients, or None."""
    choices = [(unviewed(mask.node), mask.lets_through) for mask in found.masks if mask.fill is not None]
    # The backward of a custom autograd.Function may use another mask.
    is_alike = steps is None or (
        sorted(steps.masks) == sorted(choices)
        and math.isclose(steps.scale, found.scale, rel_tol=1e-5)
        and steps.num_caps == bool(found.soft_cap)
    )
    if not is_alike:
        return "the gradient of its scores has other masks or another scale or soft cap than the scores"
    results = (r for r in (*gradients.results, gradients.sinks) if r is not None)
    known = {*found.inside, *found.readers, *gradients.inside, found.second, *results}
    if gradients.bias is not None:
        known |= set(gradients.bias.readers)
    for node in sorted(found.inside | gradients.inside):
        for user in node.users if node.target is not aten.sym_size.int else ():
            if user not in known:
                return f"{user.name} also reads {node.name}"
    return None
