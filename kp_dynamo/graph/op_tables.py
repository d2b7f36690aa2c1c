"""Tables of the ATen and kp ops that are matmuls, views, parts and moves; each says what its ops have in common."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators

aten = torch.ops.aten
kp = torch.ops.kp

# Positions of the operands that are multiplied. This excludes the addend of addmm and baddbmm and the bias of a
# convolution: they are accumulated in float32.
MATMULS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
    kp.linear_act.default: (0, 1),
    kp.linear_act_train.default: (0, 1),
    kp.contract.default: (0, 1),
    kp.linear_cross_entropy.default: (0, 1),
    kp.linear_cross_entropy_backward.default: (1, 2),
    # Queries, keys and values; the backward ops take the gradient before and the result after them.
    kp.attention.default: (0, 1, 2),
    kp.attention_train.default: (0, 1, 2),
    kp.attention_backward.default: (0, 1, 2, 3, 4),
    kp.attention_backward.bias: (0, 1, 2, 3, 4),
    kp.attention_backward.sinks: (0, 1, 2, 3, 4),
    kp.flash_attention.default: (0, 1, 2),
    kp.flash_attention_train.default: (0, 1, 2),
    kp.flash_attention_backward.default: (0, 1, 2, 3, 4),
}
LINEAR_ACTS = (kp.linear_act.default, kp.linear_act_train.default)
CROSS_ENTROPIES = (kp.linear_cross_entropy.default, kp.linear_cross_entropy_backward.default)
# Matmuls without addend: scaling an operand scales the result.
UNBIASED = (aten.mm.default, aten.bmm.default)
# Position of the addend, for ops that require it in the dtype of the operands.
BIASES: dict[Any, int] = {aten.addmm.default: 0, aten.convolution.default: 2}

# A number as a tensor, read from no other tensor.
FILLS = (aten.full.default, aten.scalar_tensor.default)
MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
# Uniform random numbers in [0, 1) in a shape that is given, or that of another tensor.
UNIFORM = (aten.rand.default, aten.rand_like.default)
SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PERMUTATIONS = (aten.t.default, aten.transpose.int, aten.permute.default)
# Views and copies of all elements: a cast commutes with them.
VIEWS = (
    *RESHAPES, *PERMUTATIONS, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default,
)  # fmt: skip
# The same elements in the same places.
SAME_ELEMENTS = (aten.clone.default, aten.alias.default, aten.detach.default)
# The same elements in another shape or dtype.
VIEWS_AND_CASTS = (*VIEWS, aten._to_copy.default)
# Slices and concatenations: a cast commutes with them too, but before a slice it casts more elements.
PARTS = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.cat.default, operator.getitem,
)  # fmt: skip
# Ops that rearrange values by integer operands, or fill in constants: exact in any dtype.
MOVES = (
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.constant_pad_nd.default, aten.flip.default,
    aten.roll.default, aten.repeat.default, aten.stack.default, aten.slice_scatter.default,
    aten.select_scatter.default, aten.tril.default, aten.triu.default, aten.max_pool2d_with_indices.default,
    aten.upsample_nearest2d.default, aten.leaky_relu.default, aten.leaky_relu_backward.default,
)  # fmt: skip


def op_name(target: object) -> str:
    """The name of an ATen op: "mm" for aten.mm.default; "" for any other target."""
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if is_aten else ""  # type: ignore[attr-defined]


def users_through(node: fx.Node, through: tuple[Any, ...]) -> list[fx.Node]:
    """The users of `node`, looking through the ops of `through`."""
    found: list[fx.Node] = []
    for user in node.users:
        found += users_through(user, through) if user.target in through else [user]
    return found


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node computes each element from the operands' elements at the same position."""
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default
    )


def is_one_of(node: fx.Node, packets: tuple[object, ...]) -> bool:
    """Whether a node calls an overload of one of these ops."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in packets
