"""Rules for which matmuls may take bfloat16 operands, and which of them round their result. Does not edit the graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import backward_nodes, calls, is_tangent, tensor_of
from kp_dynamo.graph.op_tables import (
    CROSS_ENTROPIES,
    FILLS,
    LINEAR_ACTS,
    MATMULS,
    PARTS,
    PERMUTATIONS,
    VIEWS,
    op_name,
    users_through,
)
from kp_dynamo.passes.precision.cast_nodes import is_bfloat16, is_float32, is_upcast, origins
from kp_dynamo.passes.precision.sensitive_ops import ANGLES, EXPONENTIALS

aten, kp = torch.ops.aten, torch.ops.kp

# How many scales, masks and soft caps to look through for an exponential: attention has at most four.
_MAX_SCALINGS = 4
_SCALINGS = (
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.tanh.default,
    aten.maximum.default, aten.neg.default,
)  # fmt: skip
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
# Ops that keep a value computed from integers such a value: an angle, a distance.
_COUNTING = (
    *_ADDITIONS, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.neg.default, aten._to_copy.default, aten.stack.default,
)  # fmt: skip


ONE_PASS = "one_pass"
"""Key in the meta of a float32 matmul whose operands the matrix unit may round to bfloat16, as casts would."""


def float32_matmuls(graph: fx.Graph) -> list[fx.Node]:
    """Matmuls of float32 operands, in graph order, except those whose operands are upcast bfloat16."""
    return [node for node in calls(graph, *MATMULS) if _may_gain(node)]


# Other operators that XLA lowers to matmuls.
_OTHER_MATMULS = (
    "dot", "vdot", "mv", "addmv", "addr", "matmul", "linear", "einsum", "_cdist_forward", "_trilinear",
)  # fmt: skip
_MATMUL_FAMILIES = ("linalg_", "_linalg_", "cholesky", "triangular_solve", "upsample_", "_upsample_", "_fft_")


def has_float32_matmul(graph: fx.Graph) -> bool:
    """Whether the precision of float32 matmuls affects a graph: not if all operands are, or were, bfloat16."""
    others = (n for n in graph.nodes if n.op == "call_function" and _contains_matmul(op_name(n.target)))
    return (
        bool(float32_matmuls(graph)) or any(not is_bfloat16(node) for node in others) or _has_float32_recurrence(graph)
    )


def _has_float32_recurrence(graph: fx.Graph) -> bool:
    """Whether a recurrent layer multiplies a float32 state with its weights, the fourth argument."""
    layers = calls(graph, kp.recurrence.default, kp.recurrence_backward.default)
    return any(not is_bfloat16(weight) for layer in layers for weight in layer.args[3])  # type: ignore[union-attr]


def _contains_matmul(name: str) -> bool:
    return name in _OTHER_MATMULS or name.startswith(_MATMUL_FAMILIES)


def linear_matmuls(graph: fx.Graph) -> set[fx.Node]:
    """The matmuls of Linear layers, forward and backward.

    ATen has no Linear. In the forward it is a matmul whose second operand is a transposed graph input (F.linear), or
    that adds one input to a matmul with another (Conv1D of GPT-2), or an op fused from one. In the backward it is a
    matmul of a tangent and one of a forward matmul's operands. A user's own `x @ y.t()` of two inputs looks
    the same and is treated the same.
    """
    backward = backward_nodes(graph)
    found = set(calls(graph, *CROSS_ENTROPIES))
    operands: set[fx.Node] = set()
    for node in calls(graph, aten.mm.default, aten.addmm.default, *LINEAR_ACTS):
        read = [node.args[position] for position in MATMULS[node.target]]
        factors = [origin for operand in read if isinstance(operand, fx.Node) for origin in origins(operand)]
        if node not in backward and _is_linear(node):
            operands.update(factors)
            found.add(node)
        elif node in backward and any(factor in operands for factor in factors):
            found.add(node)
    return found


@dataclass(frozen=True)
class PrecisionRules:
    """Why a matmul needs the precision of its operands, or of its result.

    Attributes:
        counted: Float32 values computed from integers, such as positions.
    """

    counted: frozenset[fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph) -> PrecisionRules:
        counted: set[fx.Node] = set()
        for node in graph.nodes:
            if is_float32(node) and _is_counted(node, counted):
                counted.add(node)
        return cls(frozenset(counted))

    def problem(self, matmul: fx.Node) -> str | None:
        """Why the operands of `matmul` must not be rounded, or None."""
        for position in MATMULS[matmul.target]:
            operand = matmul.args[position]
            if operand in self.counted:
                return f"{operand} is computed from integers (positions?), which bfloat16 represents only up to 256"
        angle = _reader(matmul, ANGLES, _MAX_SCALINGS)
        return f"{angle} reads it as an angle, modulo a period" if angle else None


def keeps_result(matmul: fx.Node, reduced: Collection[fx.Node] = (), *, rounds_sums: bool = False) -> bool:
    """Whether rounding the result of `matmul` would cost accuracy and save little or nothing.

    1. The graph returns it, in float32 anyway: logits, the gradients of weights. Those in `reduced` are not kept: the
       devices send each other half of the bytes if they are rounded.
    2. An exponential reads it after scales and masks: scores of attention.
    3. It is added directly to a float32 value: a residual. The sum is fused into the matmul. Not with `rounds_sums`:
       devices that each have a part of the result send it to each other first.
    4. Its addend is not a bias: a mask, which bfloat16 may not represent, or a residual.
    5. It is a convolution with a bias, which XLA adds to the rounded result, and rounds again: ConvNeXt's outputs err
       1.21 times as much as autocast's that way, 0.88 times with one rounding less.
    6. It is a convolution of an inference graph: XLA then fuses the BatchNorm after it, and a residual sum. A ResNet-50
       takes a v5e 0.95 modelled ms, and 1.08 with rounded results. In training, the results are saved.
    """
    if matmul.target in LINEAR_ACTS or not isinstance(matmul.meta["val"], torch.Tensor):
        return False
    users = users_through(matmul, VIEWS + PARTS)
    if reduced and _is_only(matmul, reduced):
        return False
    if any(user.op == "output" for user in users) or _reader(matmul, EXPONENTIALS, _MAX_SCALINGS):
        return True
    if matmul.target is aten.baddbmm.default or (matmul.target is aten.addmm.default and not _adds_bias(matmul)):
        return True
    if matmul.target is aten.convolution.default and (matmul.args[2] is not None or _is_inference(matmul.graph)):
        return True
    return not rounds_sums and bool(users) and all(_adds_to_float32(user, matmul) for user in users)


def _is_only(matmul: fx.Node, results: Collection[fx.Node]) -> bool:
    """Whether all that reads a matmul is the output of the graph, and only as one of these results."""
    if matmul in results:
        return all(user.op == "output" for user in matmul.users)
    return bool(matmul.users) and all(user.target in VIEWS and _is_only(user, results) for user in matmul.users)


def _is_inference(graph: fx.Graph) -> bool:
    return not any(map(is_tangent, graph.find_nodes(op="placeholder")))


def _may_gain(matmul: fx.Node) -> bool:
    operands = [matmul.args[position] for position in MATMULS[matmul.target]]
    if matmul.meta.get(ONE_PASS):
        return False
    return all(is_float32(operand) for operand in operands) and not all(
        is_upcast(origin)
        for operand in operands
        for origin in origins(operand)  # type: ignore[arg-type]  # a float32 operand is a node
    )


def _is_linear(matmul: fx.Node) -> bool:
    if matmul.target in LINEAR_ACTS:
        return True
    weight = matmul.args[MATMULS[matmul.target][1]]
    assert isinstance(weight, fx.Node), "a matmul of tensors"
    origin = next(origins(weight))
    is_transposed = weight.target in PERMUTATIONS
    return _is_input(origin) and (is_transposed or _adds_bias(matmul))


def _adds_bias(matmul: fx.Node) -> bool:
    bias = tensor_of(matmul.args[0]) if matmul.target is aten.addmm.default else None
    return bias is not None and bias.dim() == 1


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_counted(node: fx.Node, counted: set[fx.Node]) -> bool:
    if op_name(node.target) == "arange":
        return True
    sources = [s for s in node.all_input_nodes if tensor_of(s) is not None and s.target not in FILLS]
    is_arithmetic = node.target in _COUNTING + VIEWS + PARTS
    return is_arithmetic and bool(sources) and all(s in counted or _is_integer(s) for s in sources)


def _is_integer(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype in (torch.int16, torch.int32, torch.int64)


def _reader(node: fx.Node, names: tuple[str, ...], max_scalings: int) -> fx.Node | None:
    """The first op of `names` that reads `node`, directly or after scales and masks."""
    for user in users_through(node, VIEWS + PARTS):
        if op_name(user.target) in names:
            return user
        if user.target in _SCALINGS and max_scalings and (found := _reader(user, names, max_scalings - 1)):
            return found
    return None


def _adds_to_float32(user: fx.Node, matmul: fx.Node) -> bool:
    others = [other for other in user.all_input_nodes if matmul not in origins(other)]
    if user.target not in _ADDITIONS or len(others) != 1 or not is_float32(others[0]):
        return False
    is_matmul = any(origin.target in MATMULS for origin in origins(others[0]))
    return not is_matmul and _dim(others[0]) == _dim(user)


def _dim(node: fx.Node) -> int:
    value = tensor_of(node)
    return value.dim() if value is not None else -1
