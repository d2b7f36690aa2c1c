"""Follows logits from the matmul of a head to what reads them. Does not edit the graph.

Between the matmul and a reader may stand what picks or reshapes rows, factors, and one tanh: the soft cap
`cap * tanh(logits / cap)` of Gemma 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import DIVISIONS, MULTIPLICATIONS, RESHAPES
from kp_dynamo.ops.linear_act import fits
from kp_dynamo.passes.constants.values import factor_of

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten._to_copy.default)
_SCALINGS = (*MULTIPLICATIONS, *DIVISIONS)
# All but the factors and tanh pick or reshape rows: the same can be done to the rows before the matmul.
FORWARD = (*RESHAPES, *_COPIES, *_SCALINGS, aten.slice.Tensor, aten.tanh.default)
BACKWARD = (*RESHAPES, *_COPIES, *_SCALINGS, aten.slice_backward.default, aten.tanh_backward.default)

Chain = tuple[fx.Node, ...]
"""A matmul and successive users, in forward order."""


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
    def of(cls, nodes: Iterable[fx.Node], tanh: Any = aten.tanh.default) -> Scaling | None:
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


def chain_to(node: fx.Node) -> Chain:
    """The chain that ends at `node`; its first node is a matmul only if the values of `node` are logits."""
    nodes = [node]
    while nodes[-1].target in FORWARD:
        nodes.append(nodes[-1].args[0])  # type: ignore[arg-type]  # the operand of a chain is a tensor
    return tuple(reversed(nodes))


def readers_of(matmul: fx.Node, forward: set[fx.Node]) -> Iterator[tuple[fx.Node, Chain]]:
    """What reads logits in the forward, each with the chain from the matmul to the value that it reads."""
    chains: list[Chain] = [(matmul,)]
    while chains:
        chain = chains.pop()
        for user in chain[-1].users:
            if user in forward and user.target in FORWARD and user.args[0] is chain[-1]:
                chains.append((*chain, user))
            elif user in forward or user.op == "output":
                yield user, chain


def picked_rows(chain: Iterable[fx.Node]) -> list[Any]:
    """The slices of rows. Chains with equal ones have the same rows in the same order: views keep the order."""
    slices = [node for node in chain if node.target in (aten.slice.Tensor, aten.slice_backward.default)]
    return [_picked(node) for node in slices if _sizes(node) != _sizes(node.args[0])]


def _picked(node: fx.Node) -> Any:
    """(sizes of the whole, dimension, start, end, step) of a slice, or of the gradient of one."""
    is_backward = node.target is aten.slice_backward.default
    whole = node if is_backward else node.args[0]
    return (*_sizes(whole)[:-1], *(str(a) for a in _slice(node.args[2:] if is_backward else node.args[1:])))


def _slice(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a slice with its defaults."""
    return tuple(args[i] if i < len(args) else default for i, default in enumerate((0, None, None, 1)))


def _sizes(node: Any) -> tuple[str, ...]:
    """The sizes as text: symbolic ones are compared without a guard."""
    return tuple(map(str, fake_of(node).shape))


def keeps_rows(node: fx.Node, num_classes: int) -> bool:
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
