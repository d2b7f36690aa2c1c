"""Operators that say how a tensor is sharded, and those that torch_xla lowers to what XLA cannot cut."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

from kp_dynamo import compat
from kp_dynamo.lowering.pure_forms import PURE_FORMS
from kp_dynamo.lowering.spmd import annotated, batch_sharding, is_spmd, replicated
from kp_dynamo.lowering.view_forms import VIEW_FORMS

aten = torch.ops.aten

# torch_xla 2.9 makes a batch norm over all rows of them, and every device would compute all rows.
_IN_PARTS = (
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
)


# Scatters: XLA's partitioner ends the process where it has to share out a dimension unevenly (torch_xla 2.9: "Check
# failed: ShapeUtil::IsScalarWithElementType").
_SCATTERS = (
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)


def form_of(target: Any, is_sharded: bool) -> Callable[..., Any] | None:
    """What stands in for an operator while a graph is traced; None where torch_xla's own form is right.

    Args:
        target: The operator.
        is_sharded: Whether several devices run the program. To one alone, all but views are what they compute.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if (form := VIEW_FORMS.get(target) or PURE_FORMS.get(target)) is not None:
        return form
    if target in _SCATTERS:
        return partial(_scatter, target) if is_sharded else None
    if target in _IN_PARTS:
        return decomposition_table[target] if is_sharded else None
    if (sharding_of := _SHARDING_OF.get(target.name())) is None:
        return None
    return lambda x, *args: annotated(x, sharding_of(x, *args)) if is_sharded else x.clone()


def _scatter(target: Any, *args: Any, **kwargs: Any) -> Any:
    """A scatter; of tensors that every device has all of, where a size is no multiple of the devices."""
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(size % compat.num_devices() for t in tensors for size in t.shape if size != 1):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: annotated(t, replicated()), (args, kwargs))
    return target(*args, **kwargs)


def _of_batch(x: torch.Tensor, mesh_shape: list[int]) -> Any:
    return batch_sharding(mesh_shape, x.dim())


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
    "xla::aot_mark_sharding": _of_torch_xlas_function,  # what mark_sharding_with_gradients is made of
    "xla::dynamo_mark_sharding": _of_torch_xlas_operator,
}

_library = torch.library.Library("kp", "FRAGMENT")


def _eager(x: torch.Tensor, mesh_shape: list[int]) -> torch.Tensor:
    return annotated(x, _of_batch(x, mesh_shape)) if is_spmd() else x.clone()


_library.impl("shard_batch", _eager, "XLA")
