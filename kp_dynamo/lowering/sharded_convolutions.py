"""Grouped convolutions over several devices.

XLA's partitioner (torch_xla 2.9) goes wrong if a tensor of a grouped convolution is divided along one axis of the mesh
and whole along another: it multiplies the gradient of the weight by the size of the other axis. With a divided weight,
results are wrong too, or the process ends. So each device gets rows of its own and the whole weight; a batch that does
not divide among all devices is whole on each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.compat import xla
from kp_dynamo.lowering import spmd, tensor_shardings
from kp_dynamo.lowering.convolution_forms import CONVOLUTION_FORMS
from kp_dynamo.lowering.placed_tensors import current_mesh
from kp_dynamo.sharding.mesh import DATA

aten = torch.ops.aten
_one = CONVOLUTION_FORMS[aten.convolution.default]
_one_backward = CONVOLUTION_FORMS[aten.convolution_backward.default]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    if settings[-1] == 1:
        return _one(x, weight, bias, *settings)
    bias = None if bias is None else _whole(bias)
    return _by_rows(_one(_by_rows(x), _whole(weight), bias, *settings))


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> Any:
    if settings[-2] == 1:
        return _one_backward(gradient, x, weight, *settings)
    of_x, of_weight, of_bias = _one_backward(_by_rows(gradient), _by_rows(x), _whole(weight), *settings)
    return (
        None if of_x is None else _by_rows(of_x),
        None if of_weight is None else _whole(of_weight),
        None if of_bias is None else _whole(of_bias),
    )


def _whole(x: Tensor) -> Tensor:
    return tensor_shardings.annotated(x, spmd.replicated())


def _by_rows(x: Tensor) -> Tensor:
    """`x` with dimension 0 divided among all devices, those along "data" first: what they have stays where it is."""
    count = xla.num_devices()
    if x.shape[0] % count:
        return _whole(x)
    mesh = current_mesh()
    ordered = mesh.beginning_with(DATA) if mesh is not None and mesh.has(DATA) else mesh
    device_ids = () if ordered is None else ordered.device_ids
    return tensor_shardings.annotated(x, spmd.batch_sharding((count,), x.dim(), device_ids))


SHARDED_CONVOLUTIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
