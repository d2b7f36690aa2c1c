"""Look up the form that replaces an operator in a trace, and lower the operators that shard a tensor."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.lowering.accumulation_forms import in_float32
from kp_dynamo.lowering.cast_forms import CAST_FORMS
from kp_dynamo.lowering.comparison_forms import COMPARISON_FORMS
from kp_dynamo.lowering.complex_forms import COMPLEX_FORMS
from kp_dynamo.lowering.complex_functions import COMPLEX_FUNCTIONS
from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS
from kp_dynamo.lowering.integer_forms import INTEGER_FORMS
from kp_dynamo.lowering.linalg_forms import LINALG_FORMS
from kp_dynamo.lowering.norm_forms import NORM_FORMS
from kp_dynamo.lowering.order_forms import ORDER_FORMS
from kp_dynamo.lowering.pool_forms import POOL_FORMS
from kp_dynamo.lowering.pure_forms import PURE_FORMS
from kp_dynamo.lowering.random_forms import RANDOM_FORMS
from kp_dynamo.lowering.reduction_forms import REDUCTION_FORMS
from kp_dynamo.lowering.scatter_forms import SCATTER_FORMS
from kp_dynamo.lowering.sharded_scatters import SCATTERS, scattered
from kp_dynamo.lowering.softmax_forms import SOFTMAX_FORMS
from kp_dynamo.lowering.spmd import annotated, batch_sharding, is_spmd
from kp_dynamo.lowering.view_forms import VIEW_FORMS

FORMS: dict[Any, Callable[..., Any]] = {
    **PURE_FORMS, **VIEW_FORMS, **NORM_FORMS, **REDUCTION_FORMS, **ELEMENTWISE_FORMS, **RANDOM_FORMS, **POOL_FORMS,
    **LINALG_FORMS, **CAST_FORMS, **INTEGER_FORMS, **COMPARISON_FORMS, **SCATTER_FORMS,
    **SOFTMAX_FORMS, **ORDER_FORMS, **COMPLEX_FORMS, **COMPLEX_FUNCTIONS,
}  # fmt: skip


def form_of(target: Any, is_sharded: bool) -> Callable[..., Any] | None:
    """The form that replaces an operator while a graph is traced; None if torch_xla's own lowering is right.

    Args:
        target: The operator.
        is_sharded: Whether the program runs on several devices. On one device, marking a tensor does nothing.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    form = FORMS.get(target, target)
    if target in SCATTERS and is_sharded:
        form = partial(scattered, form)
    if (wide := in_float32(target, form)) is not target:
        return wide
    if (sharding_of := _SHARDING_OF.get(target.name())) is None:
        return None
    return lambda x, *args: annotated(x, sharding_of(x, *args)) if is_sharded else x.clone()


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
    "xla::aot_mark_sharding": _of_torch_xlas_function,  # mark_sharding_with_gradients calls it
    "xla::dynamo_mark_sharding": _of_torch_xlas_operator,
}

_library = torch.library.Library("kp", "FRAGMENT")


def _eager(x: torch.Tensor, mesh_shape: list[int]) -> torch.Tensor:
    return annotated(x, _of_batch(x, mesh_shape)) if is_spmd() else x.clone()


_library.impl("shard_batch", _eager, "XLA")
