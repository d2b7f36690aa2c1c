"""Matmuls of weights in graphs for several chips that are all along the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import LINEAR_ACTS, MATMULS, VIEWS_AND_CASTS
from kp_dynamo.sharding.fsdp import SMALL, best_dim
from kp_dynamo.sharding.mesh import DATA, NamedMesh

aten, kp = torch.ops.aten, torch.ops.kp

WEIGHT_MATMULS = (aten.mm.default, aten.addmm.default, kp.contract.default, *LINEAR_ACTS)


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
    """The dimension that "fsdp" divides of a parameter, by its gradient; None if none divides."""
    value = fake_of(gradient)
    return best_dim(value, (None,) * value.dim(), NamedMesh.of({DATA: num_chips}))


def has_many_rows(matmul: fx.Node, weight: fx.Node) -> bool:
    """Whether `weight`, an operand or the result, has no more elements than the other two together."""
    three = (matmul, *(matmul.args[position] for position in MATMULS[matmul.target]))
    sizes = {node: _num_elements(node) for node in three}
    return 2 * sizes[weight] <= sum(sizes.values())


def _num_elements(node: Any) -> int:
    value = node.meta["val"]
    first: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]  # of kp::linear_act_train
    return math.prod(hint_int(size, fallback=1) for size in first.shape)
