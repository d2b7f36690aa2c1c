"""SPMD: read, set and trace the shardings of tensors.

torch_xla's virtual device represents all devices. A tensor on it has its full shape for its readers, and is placed on
the devices by its sharding. XLA partitions a program for the shardings of its arguments, so they are part of its key,
but its results do not depend on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from kp_dynamo.compat import importing, xla
from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.lowering.pending import run_pending

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


def shardings(values: Sequence[Any]) -> tuple[str, ...]:
    """The sharding of each tensor among these, in XLA's notation. Requires SPMD.

    Pending tensors are computed first, because XLA only knows their shardings then.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    on_xla = [t for t in tensors if t.device.type == "xla"]
    run_pending(on_xla)
    names = iter(xla.xlac()._get_xla_sharding_specs([_as_it_lies(t) for t in on_xla]))
    return tuple((next(names) or WHOLE) if t.device.type == "xla" else WHOLE for t in tensors)


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose annotation matches the buffer of `tensor`, which must not be pending.

    `clear_sharding` of torch_xla 2.9 removes the annotation, but leaves the buffer sharded. A tensor that is still on
    the host has no annotation either: it is replicated when it is sent to the devices.
    """
    xlac = xla.xlac()
    if not tensor.dim() or xlac._get_xla_sharding_spec(tensor):
        return tensor
    _, buffers = xlac._get_tensors_xla_device_data_node([tensor])
    return buffers[0] if buffers else tensor


def sharded_placeholder(make: Callable[[], torch.Tensor], argument: torch.Tensor) -> torch.Tensor:
    """A tensor from `make`, without a buffer, with the sharding of `argument`.

    torch_xla 2.9 annotates a tensor without a buffer by an extra node on top of the program's input. The input itself
    stays unannotated, and XLA would get too many or too few elements for it. If another tensor is copied over an
    annotated tensor, the annotation remains, and passes to the input that the tensor then is.
    """
    xlac, annotated, bare = xla.xlac(), make(), make()
    xlac._xla_annotate_custom_sharding(annotated, sharding_of(argument))
    inner = torch._from_functional_tensor if torch._is_functional_tensor(annotated) else _itself
    with torch._C._AutoDispatchBelowAutograd():
        inner(annotated).copy_(inner(bare))
    xlac._get_xla_sharding_spec(annotated)  # reading the spec passes the annotation on
    return annotated


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether every device holds the whole tensor, which must not be pending."""
    return tensor.device.type != "xla" or xla.xlac()._get_xla_sharding_spec(_as_it_lies(tensor)) in ("", WHOLE)


def is_uneven(value: Any) -> bool:
    """Whether the shards of a tensor have different sizes."""
    if not isinstance(value, torch.Tensor) or value.device.type != "xla":
        return False
    found = re.match(r"\{devices=\[([\d,]+)\]", xla.xlac()._get_xla_sharding_spec(_as_it_lies(value)))
    parts = [int(n) for n in found[1].split(",")] if found else []
    # One number more than the tensor has dimensions is the number of replicas.
    return any(size % count for size, count in zip(value.shape, parts, strict=False))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sharding_of(argument: torch.Tensor) -> Any:
    """XLA's sharding of a tensor that is not pending."""
    # torch_xla 2.9 has no public function for this.
    is_on_xla = argument.device.type == "xla"
    found = xla.xlac()._get_xla_op_sharding(_as_it_lies(argument)) if is_on_xla else None
    return replicated() if found is None else found


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
    """`tensor`, with dimension 0 sharded along the first axis of a mesh from now on.

    `device_ids` are the devices of the mesh in row-major order; empty: 0, 1, 2 and so on. Tensors on the CPU, tensors
    that the user sharded and 0-dim tensors are unchanged; without SPMD, all tensors are. So are the tensors of a
    transform of torch.func, whose dimension 0 is not the caller's, and those with a tangent.
    """
    if _is_transformed():
        return tensor
    if torch.compiler.is_compiling():
        return torch.ops.kp.shard_batch(tensor, mesh_shape, device_ids)  # type: ignore[no-any-return]
    if tensor.device.type != "xla" or not tensor.dim() or not is_spmd():
        return tensor
    if xla.xlac()._get_xla_sharding_spec(tensor) in ("", WHOLE):
        # Like the public `mark_sharding` of torch_xla 2.9, but without the DTensor subclass that it returns.
        xla.xlac()._xla_mark_sharding(tensor, batch_sharding(mesh_shape, tensor.dim(), device_ids))
    return tensor


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Dynamo has guards for both
def _is_transformed() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is active, also one that Dynamo is tracing."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def divided_like(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """`copied`, which comes from the host, divided over the devices as `tensor` is, which must not be pending."""
    if is_spmd() and not is_whole(tensor):
        # Like the public `mark_sharding` of torch_xla 2.9, but without the DTensor subclass that it returns.
        xla.xlac()._xla_mark_sharding(copied, sharding_of(tensor))
    return copied


def annotated(tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
    """`tensor` after an operation that makes XLA shard it."""
    result = tensor.clone()
    # torch_xla 2.9: its public `mark_sharding` reads the tensor, which has no value while a graph is traced.
    xla.xlac()._xla_annotate_custom_sharding(result, sharding)
    return result
