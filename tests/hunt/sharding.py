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
def _mesh(shape: tuple[int, ...]) -> Any:
    import torch_xla.distributed.spmd as spmd

    return spmd.Mesh(list(range(NUM_DEVICES)), shape)


def shard(tensor: torch.Tensor, how: str) -> None:
    """Share dimensions over the devices; a tensor keeps the sharding it has.

    Args:
        tensor: An input.
        how: "first": the first dimension that is large enough; "last": the last one; "grid": the first and the last
            over two devices each; "whole": every device has all of it.
    """
    import torch_xla.distributed.spmd as spmd

    from kp_dynamo.compat import xla

    if tensor.device.type != "xla" or xla.xlac()._get_xla_sharding_spec(tensor):
        return
    large = [d for d, size in enumerate(tensor.shape) if size >= NUM_DEVICES]
    if how == "grid" and len(large) > 1:
        places = {large[0]: 0, large[-1]: 1}
    else:
        places = {} if how == "whole" or not large else {large[-1 if how == "last" else 0]: 0}
    if places or how == "whole":
        mesh = _mesh((2, 2) if len(places) == 2 else (NUM_DEVICES,))
        spmd.mark_sharding(tensor, mesh, tuple(places.get(d) for d in range(tensor.dim())))
