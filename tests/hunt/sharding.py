"""Four devices in one process: what lies where."""

from __future__ import annotations

import functools
from typing import Any

import torch

NUM_DEVICES = 4


def start() -> None:
    """Switch SPMD on, before anything uses a device."""
    from kp_dynamo import TPUConfig, create_xla_integration

    create_xla_integration(TPUConfig(topology="pod"))


@functools.cache
def _mesh() -> Any:
    import torch_xla.distributed.spmd as spmd

    return spmd.Mesh(list(range(NUM_DEVICES)), (NUM_DEVICES,))


def shard(tensor: torch.Tensor) -> None:
    """Share the first dimension that is large enough over the devices; a tensor keeps the sharding it has."""
    import torch_xla.distributed.spmd as spmd

    from kp_dynamo import compat

    if tensor.device.type != "xla" or compat.xlac()._get_xla_sharding_spec(tensor):
        return
    dim = next((d for d, size in enumerate(tensor.shape) if size >= NUM_DEVICES), None)
    if dim is not None:
        spmd.mark_sharding(tensor, _mesh(), tuple(0 if d == dim else None for d in range(tensor.dim())))
