"""SPMD: torch_xla's virtual device, which represents all devices, and its meshes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from kp_dynamo.compat import importing, xla
from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.sharding.placement import MOST_DIMS

WHOLE = "{replicated}"
"""XLA's name for the sharding of a replicated tensor."""


def is_spmd() -> bool:
    """Whether the virtual device is in use. An environment variable decides; torch_xla reads it at every use.

    Raises:
        TPUDistributedError: It was set after a device was used, which crashes torch_xla's own eager code; or XLA is
            configured to choose shardings itself.
    """
    if "XLA_USE_SPMD" not in os.environ:
        return False
    importing.load()
    import torch_xla.runtime

    is_on = bool(torch_xla.runtime.is_spmd())
    if is_on and not xla.began_with_spmd():
        raise TPUDistributedError(_too_late())
    if is_on and xla.xlac()._xla_get_auto_sharding():
        raise TPUDistributedError(
            "use_spmd(auto=True) is unsupported: XLA would choose the program's shardings, which would no longer match "
            "its arguments'. Allowed: use_spmd(). Try: mark the tensors to shard with mark_sharding."
        )
    return is_on


def _too_late() -> str:
    return (
        "SPMD is requested, but this process has used an XLA device without it, and torch_xla cannot switch later. "
        "Try: create the configuration with topology=POD, or call torch_xla.runtime.use_spmd(), before anything uses a "
        "device."
    )


def switch_on() -> None:
    """Use the virtual device from now on.

    Raises:
        TPUDistributedError: A device has been used without SPMD.
    """
    if is_spmd():
        return
    # torch_xla 2.9: locked by the first use of a device. Its own `use_spmd` only warns, and crashes at the next use.
    if xla.xlac()._xla_get_spmd_config_is_locked():
        raise TPUDistributedError(_too_late())
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()


def checked_mesh(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a mesh over all devices.

    Raises:
        TPUDistributedError: The mesh has more or fewer places than there are devices.
    """
    count = xla.num_devices()
    shape = tuple(mesh_shape) if isinstance(mesh_shape, Sequence) else ()
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape) or prod(shape) != count:
        raise TPUDistributedError(
            f"{mesh_shape=} is invalid: there are {count} devices. Allowed: ints >= 1 whose product is {count}, such "
            f"as ({count},); the first is the batch axis. Try: call wrap_model again for a model that was wrapped for "
            "other devices."
        )
    return shape


@cache
def replicated() -> Any:
    """XLA's sharding of a replicated tensor."""
    return _mesh((xla.num_devices(),)).get_op_sharding(())


@cache
def _mesh(shape: tuple[int, ...], device_ids: tuple[int, ...] = ()) -> Any:
    from torch_xla.distributed.spmd import Mesh

    return Mesh(list(device_ids or range(prod(shape))), shape)


def batch_sharding(mesh_shape: Sequence[int], rank: int, device_ids: Sequence[int] = ()) -> Any:
    """XLA's sharding of a tensor of `rank` dimensions whose first dimension is along the first axis of a mesh.

    Raises:
        TPUDistributedError: The mesh has more or fewer devices, because the model was wrapped elsewhere.
    """
    mesh = _mesh(checked_mesh(mesh_shape), tuple(device_ids))
    return mesh.get_op_sharding((0, *[None] * (rank - 1)))


def shard_batch(tensor: torch.Tensor, mesh_shape: Sequence[int], device_ids: Sequence[int] = ()) -> torch.Tensor:
    """`tensor`, with dimension 0 sharded along the first axis of a mesh from now on; in a graph, a copy that is.

    `device_ids` are the devices of the mesh in row-major order; empty: 0, 1, 2 and so on. Tensors on the CPU, tensors
    that the user sharded, and those of no or more than `MOST_DIMS` dimensions are unchanged; without SPMD, all are. So
    are the tensors of a transform of torch.func, whose dimension 0 is not the caller's, and those with a tangent.
    """
    if _is_transformed() or not 0 < tensor.dim() <= MOST_DIMS:
        return tensor
    if torch.compiler.is_compiling():
        return torch.ops.kp.shard_batch(tensor, mesh_shape, device_ids)  # type: ignore[no-any-return]
    if tensor.device.type != "xla" or not is_spmd():
        return tensor
    if xla.xlac()._get_xla_sharding_spec(tensor) in ("", WHOLE):
        # Like the public `mark_sharding` of torch_xla 2.9, but without the DTensor subclass that it returns.
        xla.xlac()._xla_mark_sharding(tensor, batch_sharding(mesh_shape, tensor.dim(), device_ids))
    return tensor


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Dynamo has guards for both
def _is_transformed() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is active, also one that Dynamo is tracing."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0
