"""Where a joint graph computes the gradients of an attention. Reads, edits nothing.

Autograd gives them one form: with w the probabilities, g the gradient of the result,

    d_v = w^T g,    d_w = g v^T,    d_s = softmax's backward of d_w, masked and scaled,    d_q = d_s k,    d_k = q^T d_s
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.passes.attention import Attention, Refusal, number_of
from kp_dynamo.passes.sensitive_ops import VIEWS

aten = torch.ops.aten

_MOVES = (*VIEWS, aten._to_copy.default)
_FACTORS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True)
class Gradients:
    """The backward of one attention.

    Attributes:
        grad: The gradient of the result, as the products read it, [N, S, E].
        d_q: The product that gives the gradient of q, or None where nobody asks for it.
        d_k: The same of k, [N, D, T].
        d_v: The same of v.
        inside: The nodes between `grad` and these.
    """

    grad: fx.Node
    d_q: fx.Node | None
    d_k: fx.Node | None
    d_v: fx.Node | None
    inside: frozenset[fx.Node]

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        return self.d_q, self.d_k, self.d_v


def gradients_of(found: Attention, backward: set[fx.Node]) -> Gradients | None:
    """The backward of an attention, or None where the graph has none.

    Raises:
        Refusal: The backward has another form than autograd's, or reads what would be there no longer.
    """
    readers = [u for node in found.inside for u in node.users if u in backward]
    if not readers:
        return None
    search = _Search(found, backward)
    gradients = search.run()
    _check(found, gradients, search.steps)
    return gradients


@dataclass
class _Steps:
    """What the way from the softmax's backward to d_s consists of."""

    scale: float = 1.0
    num_masks: int = 0


class _Search:
    """Finds the nodes of one backward."""

    def __init__(self, found: Attention, backward: set[fx.Node]) -> None:
        self.found, self.backward = found, backward
        self.steps: _Steps | None = _Steps()
        self.inside: set[fx.Node] = set()

    def run(self) -> Gradients:
        v = self.found.second.args[1]
        d_v = self._product_of_transposed(self.found.weights, first=True)
        softmax_backward = self._softmax_backward()
        if softmax_backward is None:
            return self._of_values_alone(d_v)
        d_w = softmax_backward.args[0]
        while isinstance(d_w, fx.Node) and d_w.target in _MOVES:
            self.inside.add(d_w)
            d_w = d_w.args[0]
        if not isinstance(d_w, fx.Node) or d_w.target is not aten.bmm.default or not _is_transposed(d_w.args[1], v):
            raise Refusal("the gradient of its probabilities is no product with its values")
        grad = d_w.args[0]
        if d_v is not None and d_v.args[1] is not grad:
            raise Refusal("two gradients of its result are read")
        self.inside |= {softmax_backward, d_w}
        d_q, d_k = self._score_products(softmax_backward)
        return Gradients(grad, d_q, d_k, d_v, frozenset(self.inside))  # type: ignore[arg-type]

    def _of_values_alone(self, d_v: fx.Node | None) -> Gradients:
        if d_v is None or not isinstance(d_v.args[1], fx.Node):
            raise Refusal("its probabilities have no softmax's gradient")
        self.steps = None
        return Gradients(d_v.args[1], None, None, d_v, frozenset(self.inside))

    def _softmax_backward(self) -> fx.Node | None:
        sources = [n for n in self.found.inside if n is self.found.softmax or n.target is aten.where.self]
        found = [
            u for n in sources for u in n.users
            if u in self.backward and u.target is aten._softmax_backward_data.default and u.args[1] is n
        ]  # fmt: skip
        return found[0] if len(found) == 1 else None

    def _score_products(self, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """d_q and d_k, behind the masks and factors that `node` goes through."""
        q, k = self.found.first.args
        while True:
            users = list(node.users)
            products = [u for u in users if u.target is aten.bmm.default]
            if products and len(products) == len(users):
                d_q = next((u for u in products if u.args[0] is node and _is_transposed(u.args[1], k)), None)
                d_k = next((u for u in products if u.args[1] is node and _is_transposed(u.args[0], q)), None)
                if len(products) != len([d for d in (d_q, d_k) if d is not None]):
                    raise Refusal("the gradient of its scores is read by another product")
                return d_q, d_k
            if len(users) != 1:
                names = ", ".join(u.name for u in users)
                raise Refusal(f"the gradient of its scores is read by {names}: of a mask that learns?")
            node = self._step(node, users[0])

    def _step(self, node: fx.Node, user: fx.Node) -> fx.Node:
        assert self.steps is not None, "scores have a gradient"
        factor = _factor(user, node)
        if factor is not None:
            self.steps.scale *= factor
        elif _is_masked(user, node):
            self.steps.num_masks += 1
        elif user.target not in _MOVES:
            raise Refusal(f"the gradient of its scores passes through {user.target}")
        self.inside.add(user)
        return user

    def _product_of_transposed(self, node: fx.Node, first: bool) -> fx.Node | None:
        """A backward product with `node` transposed as its first operand."""
        for transposed in _transposes(node):
            for user in transposed.users:
                if user in self.backward and user.target is aten.bmm.default and user.args[0] is transposed:
                    self.inside.add(transposed)
                    return user
        return None


def _transposes(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in node.users if _is_transposed(user, node))


def _is_transposed(node: object, source: object) -> bool:
    """Whether a node is `source` with its last two of three dimensions exchanged."""
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not source:
        return False
    if node.target is aten.transpose.int:
        return {d % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[operator]  # dimensions are numbers
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1]  # type: ignore[arg-type]


def _factor(user: fx.Node, node: fx.Node) -> float | None:
    if user.target not in _FACTORS + _QUOTIENTS or user.args[0] is not node:
        return None
    number: Any = user.args[1]
    number = number_of(number) if isinstance(number, fx.Node) else number
    if not isinstance(number, (int, float)) or number == 0:
        return None
    return 1 / number if user.target in _QUOTIENTS else float(number)


def _is_masked(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node is a gradient with zeros in it."""
    if user.target is aten.masked_fill.Scalar:
        return user.args[0] is node and bool(user.args[2] == 0)
    if user.target is not aten.where.self:
        return False
    one, other = user.args[1:]
    return (one is node and number_of(other) == 0) or (other is node and number_of(one) == 0)


def _check(found: Attention, gradients: Gradients, steps: _Steps | None) -> None:
    num_booleans = sum(mask.is_boolean for mask in found.masks)
    is_alike = steps is None or (
        steps.num_masks == num_booleans and math.isclose(steps.scale, found.scale, rel_tol=1e-5)
    )
    if not is_alike:
        raise Refusal("the gradient of its scores is masked or scaled unlike the scores")
    known = found.inside | gradients.inside | {found.second, *(r for r in gradients.results if r is not None)}
    for node in sorted(found.inside | gradients.inside):
        for user in node.users:
            if user not in known:
                raise Refusal(f"{node.name} is also read by {user.name}")
