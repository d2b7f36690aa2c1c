"""Matches a Linear in an ATen graph: a matmul, its bias, and the views and casts that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.passes.linear.activations import is_cast

aten = torch.ops.aten

LINEAR_MATMULS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True)
class Linear:
    """`input @ weight + bias`, [M, K] @ [K, N] + [N].

    Attributes:
        biased: The node that includes the bias (the matmul itself for addmm and without a bias).
        chain: The matmul and its successive users (views, the bias, casts), as long as the forward has no second user;
            the last is what an activation would read.
        problem: Why it cannot become kp::linear_act, or None.
    """

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    biased: fx.Node
    chain: tuple[fx.Node, ...]
    problem: str | None

    @property
    def value(self) -> fx.Node:
        return self.chain[-1]

    @property
    def unbiased(self) -> tuple[fx.Node, ...]:
        """The nodes before the bias is added."""
        return self.chain[: self.chain.index(self.biased)]

    @property
    def dtype(self) -> torch.dtype:
        return fake_of(self.input).dtype


def linear_at(matmul: fx.Node, forward: set[fx.Node]) -> Linear:
    """The Linear that begins at an aten.mm or aten.addmm; users outside of `forward` do not count."""
    *addend, first, second = matmul.args
    bias = addend[0] if addend else None
    problem = _problem(matmul, bias)
    chain, biased = [matmul], matmul
    while user := only_user(chain[-1], forward):
        added = _bias_added(user, chain[-1], matmul) if bias is None else None
        if added is not None:
            bias, biased = added, user
            problem = problem or _mixed(matmul, added)
        elif user.target not in RESHAPES and not is_cast(user, fake_of(matmul).dtype):
            break
        chain.append(user)
    return Linear(first, second, bias, biased, tuple(chain), problem)  # type: ignore[arg-type]


def only_user(node: fx.Node, forward: set[fx.Node]) -> fx.Node | None:
    """The only user of `node` in `forward`; None if it has several or none, or is an output."""
    users = [user for user in node.users if user in forward or user.op == "output"]
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def has_shape(node: object, shape: tuple[int | torch.SymInt, ...]) -> bool:
    """Whether the node is a tensor of this shape; adds no guard on symbolic sizes."""
    value = tensor_of(node)
    if value is None or value.dim() != len(shape):
        return False
    return all(statically_known_true(a == b) for a, b in zip(value.shape, shape, strict=True))


def _bias_added(user: fx.Node, value: fx.Node, matmul: fx.Node) -> fx.Node | None:
    columns = fake_of(matmul).shape[-1]
    # A bias after a cast would be rounded with the matmul.
    is_same_dtype = fake_of(value).dtype == fake_of(matmul).dtype
    if user.target != aten.add.Tensor or user.kwargs or not is_same_dtype:
        return None
    if not has_shape(value, (*fake_of(value).shape[:-1], columns)):
        return None
    others = [other for other in user.args if other is not value and has_shape(other, (columns,))]
    return others[0] if len(others) == 1 else None  # type: ignore[return-value]


def _problem(matmul: fx.Node, addend: object) -> str | None:
    value = fake_of(matmul)
    if not value.dtype.is_floating_point:
        return f"{value.dtype} is not a real floating-point dtype"
    if any(scale != 1 for scale in matmul.kwargs.values()):
        return "addmm with alpha or beta other than 1"
    if addend is not None and not has_shape(addend, (value.shape[-1],)):
        return "addmm with an addend that is not a bias of shape [N]"
    return None


def _mixed(matmul: fx.Node, bias: fx.Node) -> str | None:
    dtypes = fake_of(matmul).dtype, fake_of(bias).dtype
    return f"mixed dtypes: matmul {dtypes[0]}, bias {dtypes[1]}" if dtypes[0] != dtypes[1] else None
