"""Lower the operators that shard a tensor."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.lowering.spmd import batch_sharding, is_spmd
from kp_dynamo.lowering.tensor_shardings import annotated


def _of_batch(x: torch.Tensor, mesh_shape: list[int], device_ids: Sequence[int] = ()) -> Any:
    return batch_sharding(mesh_shape, x.dim(), device_ids)


def _of_torch_xlas_function(x: torch.Tensor, mesh: str, partition_spec: str) -> Any:
    from torch_xla.distributed.spmd import Mesh

    return Mesh.from_str(mesh).get_op_sharding(ast.literal_eval(partition_spec))


def _of_torch_xlas_operator(
    x: torch.Tensor, device_ids: list[int], mesh_shape: list[int], axis_names: str, partition_spec: str
) -> Any:
    from torch_xla.distributed.spmd import Mesh

    mesh = Mesh(list(device_ids), tuple(mesh_shape), ast.literal_eval(axis_names))
    return mesh.get_op_sharding(ast.literal_eval(partition_spec))


_SHARDING_OF: dict[str, Callable[..., Any]] = {
    "kp::shard_batch": _of_batch,
    "xla::aot_mark_sharding": _of_torch_xlas_function,  # mark_sharding_with_gradients calls it
    "xla::dynamo_mark_sharding": _of_torch_xlas_operator,
}


def sharding_form(target: torch._ops.OpOverload, is_sharded: bool) -> Callable[..., Any] | None:
    """The form of an operator that shards its operand, None for any other; on one device it only copies."""
    sharding_of = _SHARDING_OF.get(target.name())
    if sharding_of is None:
        return None
    return lambda x, *args: annotated(x, sharding_of(x, *args)) if is_sharded else x.clone()


_library = torch.library.Library("kp", "FRAGMENT")


def _eager(x: torch.Tensor, mesh_shape: list[int], device_ids: Sequence[int] = ()) -> torch.Tensor:
    return annotated(x, _of_batch(x, mesh_shape, device_ids)) if is_spmd() else x.clone()


_library.impl("shard_batch", _eager, "XLA")
