"""Gradients lie on the devices as their parameters do.

XLA's propagation alone leaves the gradient of a divided weight whole, or whole along one axis of the mesh: every device
then holds it, after an all-reduce. With the sharding of the weight it is reduced and scattered in the program that
computes it. A sharding never changes a value, so nothing depends on the names that are read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.lowering.spmd import annotated, is_whole, sharding_of


def with_shardings_of_parameters(results: list[Any], graph: fx.Graph, args: Sequence[Any]) -> list[Any]:
    """The results of a traced graph; in a backward, gradients of divided arguments with the argument's sharding.

    AOTAutograd calls the arguments of the forward primals_1, primals_2 and so on, keeps the names of those that it
    saves, and returns the gradients in that order. A parameter that the backward does not read is not among `args`.
    """
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    if not any(str(name).startswith("tangents_") for name in names):
        return results
    by_name = dict(zip(names, args, strict=True))

    def sharded(position: int, result: Any) -> Any:
        parameter = by_name.get(f"primals_{position + 1}")
        if not isinstance(result, torch.Tensor) or not isinstance(parameter, torch.Tensor):
            return result
        if result.shape != parameter.shape or is_whole(parameter):
            return result
        return annotated(result, sharding_of(parameter))

    return [sharded(position, result) for position, result in enumerate(results)]
