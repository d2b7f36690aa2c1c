"""Recognizes the activation that an ATen graph computes from a value, in any spelling.

An elementwise expression in a value x is read as a polynomial in x and in *atoms*, the named functions of x below:
`0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))` is `0.5 x + 0.5 x t` with t the atom "tanh of
GELU's polynomial". Spellings that differ in order, grouping or the place of a constant give the same polynomial. An
activation is a polynomial in a table. Other expressions (another function, another constant) are not recognized.

Source of the mathematics: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.ops.linear_act import fits

aten = torch.ops.aten

# {factors in order: coefficient}; {("x", "x"): 2.0, (): 1.0} is 2 x^2 + 1
Polynomial = dict[tuple[str, ...], float]

_X: Polynomial = {("x",): 1.0}
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_GELU_TANH_ARGUMENT: Polynomial = {("x",): _SQRT_2_OVER_PI, ("x", "x", "x"): _SQRT_2_OVER_PI * 0.044715}

_ATOMS: dict[object, tuple[tuple[str, Polynomial], ...]] = {
    aten.relu.default: (("relu", _X),),
    aten.silu.default: (("silu", _X),),
    aten.sigmoid.default: (("sigmoid", _X),),
    aten.tanh.default: (("tanh", _X), ("tanh of GELU", _GELU_TANH_ARGUMENT)),
    aten.erf.default: (("erf of GELU", {("x",): math.sqrt(0.5)}),),
}

_ACTIVATIONS: tuple[tuple[str, Polynomial], ...] = (
    ("relu", {("relu",): 1.0}),
    ("gelu", {("gelu",): 1.0}),
    ("gelu", {("x",): 0.5, ("erf of GELU", "x"): 0.5}),
    ("gelu_tanh", {("gelu_tanh",): 1.0}),
    ("gelu_tanh", {("x",): 0.5, ("tanh of GELU", "x"): 0.5}),
    ("silu", {("silu",): 1.0}),
    ("silu", {("sigmoid", "x"): 1.0}),
    ("tanh", {("tanh",): 1.0}),
    ("sigmoid", {("sigmoid",): 1.0}),
)

_MOST_TERMS = 6  # GELU's longest intermediate has four
_RELATIVE_TOLERANCE = 1e-6  # models write sqrt(2 / pi) with as few as eight digits


def activations_of(
    value: fx.Node, within: set[fx.Node], operand: torch.dtype
) -> Iterator[tuple[fx.Node, str, set[fx.Node]]]:
    """Nodes of `within` that are an activation of `value`, the largest expression first.

    Args:
        value: The pre-activation.
        within: Nodes that may be inspected.
        operand: Dtype of the operands of the matmul that `value` comes from: decides which casts are ignored.

    Yields:
        (node, name of the activation, the nodes between: `value` and the intermediate values, without `node`).
    """
    known: dict[fx.Node, Polynomial] = {value: _X}
    queue = [user for user in value.users if user in within]
    for node in queue:  # grows: a node whose operand is not known yet is queued again as a user of that operand
        polynomial = _polynomial(node, known, operand) if node not in known else None
        if polynomial is not None and len(polynomial) <= _MOST_TERMS:
            known[node] = polynomial
            queue += [user for user in node.users if user in within]
    for node in reversed(known):
        for name, formula in _ACTIVATIONS:
            if _is_same(known[node], formula):
                yield node, name, _between(node, known)


def is_cast(node: fx.Node, operand: torch.dtype) -> bool:
    """Whether `node` only changes the dtype, to one between `operand` and its compute dtype.

    An expression evaluated in that compute dtype without the cast is at least as accurate. A cast to a narrower dtype
    is a rounding that the model asks for.
    """
    return is_any_cast(node, operand) and not rounds(node, operand)


def rounds(node: fx.Node, operand: torch.dtype) -> bool:
    """Whether the dtype of `node` does not represent every number of `operand`."""
    return torch.promote_types(fake_of(node).dtype, operand) != fake_of(node).dtype


def is_any_cast(node: fx.Node, operand: torch.dtype) -> bool:
    """Whether `node` only changes the dtype, to one that is exact in the compute dtype of `operand`."""
    value = tensor_of(node)
    if node.target != aten._to_copy.default or value is None or not fits(value.dtype, operand):
        return False
    defaults = {"dtype": value.dtype, "layout": torch.strided, "device": value.device}
    return all(given is None or defaults.get(key) == given for key, given in node.kwargs.items())


def _between(node: fx.Node, known: dict[fx.Node, Polynomial]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        fresh = {source for source in stack.pop().all_input_nodes if source in known} - found
        found |= fresh
        stack += fresh
    return found


def _polynomial(node: fx.Node, known: dict[fx.Node, Polynomial], operand: torch.dtype) -> Polynomial | None:
    operands = [_operand(argument, known) for argument in node.args]
    if node.op != "call_function" or not operands or operands[0] is None:
        return None
    first = operands[0]
    if node.target == aten.gelu.default:
        name = "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
        return {(name,): 1.0} if _is_same(first, _X) else None
    if node.target in _ATOMS:
        atom = next((name for name, argument in _ATOMS[node.target] if _is_same(first, argument)), None)
        return {(atom,): 1.0} if atom else None
    if is_cast(node, operand):
        return first
    second = operands[1] if len(operands) == 2 else None
    return None if node.kwargs else _arithmetic(node.target, first, second)


def _arithmetic(target: object, first: Polynomial, second: Polynomial | None) -> Polynomial | None:
    if target == aten.neg.default:
        return _times(first, {(): -1.0})
    if second is None:
        return None
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        return _times(first, second)
    if target in (aten.add.Tensor, aten.add.Scalar):
        return _plus(first, second)
    if target in (aten.sub.Tensor, aten.sub.Scalar):
        return _plus(first, _times(second, {(): -1.0}))
    constant = second.get((), 0.0) if set(second) == {()} else 0.0
    if target in (aten.div.Tensor, aten.div.Scalar) and constant:
        return _times(first, {(): 1 / constant})
    if target == aten.pow.Tensor_Scalar and constant in (2, 3):
        square = _times(first, first)
        return square if constant == 2 else _times(square, first)
    return None


def _operand(argument: Any, known: dict[fx.Node, Polynomial]) -> Polynomial | None:
    if isinstance(argument, fx.Node):
        return known.get(argument)
    return {(): float(argument)} if type(argument) in (int, float) else None


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (left, p), (right, q) in product(a.items(), b.items()):
        factors = tuple(sorted(left + right))
        result[factors] = result.get(factors, 0.0) + p * q
    return result


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    return {factors: a.get(factors, 0.0) + b.get(factors, 0.0) for factors in {**a, **b}}


def _is_same(a: Polynomial, b: Polynomial) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[k], b[k], rel_tol=_RELATIVE_TOLERANCE) for k in a)
