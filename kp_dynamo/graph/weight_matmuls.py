"""Matmuls of weights in graphs for several chips, which divide weights along the batch's axis for the memory only."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import LINEAR_ACTS, MATMULS, VIEWS_AND_CASTS
from kp_dynamo.sharding.fsdp import SMALL, axes_when_gathered, best_dim
from kp_dynamo.sharding.mesh import DATA, NamedMesh
from kp_dynamo.sharding.placement import Placement, axes_of

aten, kp = torch.ops.aten, torch.ops.kp

WEIGHT_MATMULS = (aten.mm.default, aten.addmm.default, kp.contract.default, *LINEAR_ACTS)


@dataclass(frozen=True)
class DividedWeight:
    """An argument that is a parameter, which several chips divide.

    Attributes:
        position: Its position among the arguments of Dynamo's graph.
        axes: The axis of the mesh that divides each dimension beside the batch's, "" for none; (): none at all.
        dim: The dimension that the batch's axis divides. None with `axes`: it divides none; without: it is unknown.
    """

    position: int
    axes: tuple[str, ...] = ()
    dim: int | None = None

    @property
    def is_along_batch(self) -> bool:
        """Whether the batch's axis divides it."""
        return self.dim is not None or not self.axes


def divided_weights(parameters: Collection[int], placements: Mapping[int, Placement]) -> tuple[DividedWeight, ...]:
    """The weights that several chips divide, in order.

    Args:
        parameters: The positions of arguments that chips along the batch divide, by whatever dimension.
        placements: How arguments lie of which that is known.
    """
    found = {i: DividedWeight(i) for i in parameters}
    for i, placement in placements.items():
        axes = axes_when_gathered(placement)
        dim = next((d for d, along in enumerate(placement) if DATA in axes_of(along)), None)
        if axes is not None and (dim is not None or any(axes)):
            found[i] = DividedWeight(i, axes if any(axes) else (), dim)
    return tuple(found[i] for i in sorted(found))


def path_to_source(node: Any) -> list[fx.Node]:
    """A node, what it is a view or a cast of, and so on."""
    path = [node]
    while path[-1].target in VIEWS_AND_CASTS:
        path.append(path[-1].args[0])
    return path


def path_to_matmul(gradient: fx.Node) -> list[fx.Node] | None:
    """The path from the gradient of a weight to the matmul that computes it, if it has many rows.

    None if something else computes the gradient, or reads it.
    """
    path = path_to_source(gradient)
    is_alone = all(len(node.users) == 1 for node in path)
    is_of_matmul = path[-1].target in WEIGHT_MATMULS and is_alone and has_many_rows(path[-1], path[-1])
    return path if is_of_matmul else None


def is_small(gradient: fx.Node) -> bool:
    """Whether "fsdp" leaves a parameter of this size whole on every chip."""
    return fake_of(gradient).numel() < SMALL


def divided_dim(gradient: fx.Node, num_chips: int) -> int | None:
    """The dimension that "fsdp" divides of a parameter that is whole else, by its gradient; None if none divides."""
    value = fake_of(gradient)
    return best_dim(value, (None,) * value.dim(), NamedMesh.of({DATA: num_chips}))


def axes_in(value: fx.Node, view: fx.Node, axes: Sequence[str], num_parts: int) -> tuple[str, ...] | None:
    """The axis of each dimension of a value, given those of a view of it; None if a dimension is not found.

    Args:
        value: A value.
        view: A view or a cast of it, or what it is a view or a cast of.
        axes: The axis that divides each dimension of `view`, "" for none; () for none at all.
        num_parts: Among how many chips they divide.
    """
    found = [""] * fake_of(value).dim()
    for dim, axis in enumerate(axes):
        if axis:
            place = dim_in(value, view, dim, num_parts)
            if place is None or found[place]:
                return None
            found[place] = axis
    return tuple(found) if any(found) else ()


def dim_in(value: fx.Node, view: fx.Node, dim: int, num_parts: int) -> int | None:
    """The dimension of a value whose parts are those of a dimension of its view, by the strides of both; else None.

    Where the value has several dimensions in place of one, parts are divided along the outermost of them.
    """
    whole, seen = fake_of(value), fake_of(view)
    least, size = seen.stride(dim), seen.shape[dim]
    inside = [i for i in range(whole.dim()) if whole.shape[i] > 1 and least <= whole.stride(i) < least * size]
    outermost = max(inside, key=whole.stride, default=None)
    return outermost if outermost is not None and whole.shape[outermost] % num_parts == 0 else None


def has_many_rows(matmul: fx.Node, weight: fx.Node) -> bool:
    """Whether `weight`, an operand or the result, has no more elements than the other two together."""
    three = (matmul, *(matmul.args[position] for position in MATMULS[matmul.target]))
    sizes = {node: _num_elements(node) for node in three}
    return 2 * sizes[weight] <= sum(sizes.values())


def _num_elements(node: Any) -> int:
    value = node.meta["val"]
    first: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]  # of kp::linear_act_train
    return math.prod(hint_int(size, fallback=1) for size in first.shape)
