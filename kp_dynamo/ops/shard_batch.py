"""`kp::shard_batch`: shard dimension 0 of a tensor, the batch, along the first axis of a device mesh.

    shard_batch(x: [B, ...], mesh_shape, device_ids) -> x: [B, ...]

`device_ids` are the devices of the mesh in row-major order; empty: 0, 1, 2 and so on.

It does not change values. The gradient gets the same sharding. `kp_dynamo/lowering/sharded_forms.py` lowers it to XLA,
with the sharding from `kp_dynamo/lowering/spmd.py`, which knows the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "shard_batch(Tensor x, int[] mesh_shape, int[] device_ids=[]) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)


def _on_cpu(x: Tensor, mesh_shape: list[int], device_ids: Sequence[int] = ()) -> Tensor:
    return x.clone()


def _fake(x: Tensor, mesh_shape: list[int], device_ids: Sequence[int] = ()) -> Tensor:
    return torch.empty_like(x)


def _keep_mesh(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mesh = inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.kp.shard_batch(gradient, *ctx.mesh), None, None


_library.impl("shard_batch", _on_cpu, "CPU")
torch.library.register_fake("kp::shard_batch", _fake, lib=_library)
torch.library.register_autograd("kp::shard_batch", _backward, setup_context=_keep_mesh, lib=_library)
