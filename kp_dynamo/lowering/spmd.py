"""Several devices as one (SPMD): how tensors are sharded, and traces that carry it.

torch_xla's virtual device stands for all devices. A tensor on it is whole to whoever reads it, and lies on the devices
as its sharding says. XLA cuts a program for the shardings of its arguments, so that they are part of its identity;
what it computes does not depend on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.lowering.pending import run_pending

WHOLE = "{replicated}"
"""XLA's name of the sharding of a tensor that every device has all of."""


def is_spmd() -> bool:
    """Whether the virtual device is in use: an environment variable, which torch_xla reads at every use.

    Raises:
        TPUDistributedError: It was set after a device had been used: torch_xla's own eager code crashes then. Or XLA
            is asked to choose shardings itself.
    """
    if "XLA_USE_SPMD" not in os.environ:
        return False
    xla.load()
    import torch_xla.runtime

    is_on = bool(torch_xla.runtime.is_spmd())
    if is_on and not xla.began_with_spmd():
        raise TPUDistributedError(_too_late())
    if is_on and xla.xlac()._xla_get_auto_sharding():
        raise TPUDistributedError(
            "use_spmd(auto=True): XLA would choose how arguments lie, and program and arguments would part. Allowed: "
            "use_spmd(), and mark_sharding of what is to be shared."
        )
    return is_on


def _too_late() -> str:
    return (
        "SPMD is asked for, but an XLA device of this process has been used without, and torch_xla cannot change that. "
        "Make the configuration with topology=POD, or call torch_xla.runtime.use_spmd(), before anything uses a device."
    )


def switch_on() -> None:
    """Use the virtual device from now on.

    Raises:
        TPUDistributedError: A device has been used without.
    """
    if is_spmd():
        return
    # torch_xla 2.9: locked by the first use of a device. Its own `use_spmd` only warns, and crashes at the next use.
    if xla.xlac()._xla_get_spmd_config_is_locked():
        raise TPUDistributedError(_too_late())
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()


def checked_mesh(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """A mesh over all devices.

    Raises:
        TPUDistributedError: Its places are more or fewer than the devices.
    """
    count = xla.num_devices()
    shape = tuple(mesh_shape) if isinstance(mesh_shape, Sequence) else ()
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape) or prod(shape) != count:
        raise TPUDistributedError(
            f"mesh_shape is {mesh_shape!r}, and there are {count} devices; allowed: ints >= 1 whose product is "
            f"{count}, such as ({count},), of which the first is the axis of the batch. A model that was wrapped for "
            "other devices is to be given to wrap_model again."
        )
    return shape


def shardings(values: Sequence[Any]) -> tuple[str, ...]:
    """How each tensor among these is sharded, in XLA's words; SPMD is on.

    Where a tensor has no value yet it is computed: only then does XLA say how it is sharded.
    """
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    on_xla = [t for t in tensors if t.device.type == "xla"]
    run_pending(on_xla)
    names = iter(xla.xlac()._get_xla_sharding_specs([_as_it_lies(t) for t in on_xla]))
    return tuple((next(names) or WHOLE) if t.device.type == "xla" else WHOLE for t in tensors)


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose annotation is true of the buffer of `tensor`, which is settled.

    `clear_sharding` of torch_xla 2.9 takes the annotation off, and leaves the buffer in its parts. A tensor that waits
    on the host has no annotation either: it is sent to all devices whole.
    """
    xlac = xla.xlac()
    if not tensor.dim() or xlac._get_xla_sharding_spec(tensor):
        return tensor
    _, buffers = xlac._get_tensors_xla_device_data_node([tensor])
    return buffers[0] if buffers else tensor


def sharded_placeholder(make: Callable[[], torch.Tensor], argument: torch.Tensor) -> torch.Tensor:
    """A tensor of `make`, without a buffer, that is sharded as `argument` is.

    torch_xla 2.9 annotates a tensor that has no buffer by a node of its own on top of the program's input, and leaves
    the input bare, for which XLA would then be given too many or too few of the elements. An annotated tensor over
    which another is copied keeps its annotation, and hands it to the input it then is.
    """
    xlac, annotated, bare = xla.xlac(), make(), make()
    xlac._xla_annotate_custom_sharding(annotated, _sharding_of(argument))
    inner = torch._from_functional_tensor if torch._is_functional_tensor(annotated) else _itself
    with torch._C._AutoDispatchBelowAutograd():
        inner(annotated).copy_(inner(bare))
    xlac._get_xla_sharding_spec(annotated)  # the reading hands it on
    return annotated


def is_uneven(value: Any) -> bool:
    """Whether devices have parts of different sizes of a tensor."""
    if not isinstance(value, torch.Tensor) or value.device.type != "xla":
        return False
    found = re.match(r"\{devices=\[([\d,]+)\]", xla.xlac()._get_xla_sharding_spec(_as_it_lies(value)))
    parts = [int(n) for n in found[1].split(",")] if found else []
    # A last number more than there are dimensions counts copies.
    return any(size % count for size, count in zip(value.shape, parts, strict=False))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _sharding_of(argument: torch.Tensor) -> Any:
    # torch_xla 2.9 has no public way to ask.
    is_on_xla = argument.device.type == "xla"
    found = xla.xlac()._get_xla_op_sharding(_as_it_lies(argument)) if is_on_xla else None
    return replicated() if found is None else found


@cache
def replicated() -> Any:
    """XLA's sharding of a tensor that every device has all of."""
    return _mesh((xla.num_devices(),)).get_op_sharding(())


@cache
def _mesh(shape: tuple[int, ...]) -> Any:
    from torch_xla.distributed.spmd import Mesh

    return Mesh(list(range(prod(shape))), shape)


def batch_sharding(mesh_shape: Sequence[int], rank: int) -> Any:
    """XLA's sharding of a tensor of `rank` dimensions, the first of them along the first axis of a mesh.

    Raises:
        TPUDistributedError: The mesh is one of more or fewer devices, as of a model that was wrapped elsewhere.
    """
    return _mesh(checked_mesh(mesh_shape)).get_op_sharding((0, *[None] * (rank - 1)))


def shard_batch(tensor: torch.Tensor, mesh_shape: Sequence[int]) -> torch.Tensor:
    """`tensor`, whose dimension 0 lies on the devices along the first axis of a mesh from now on.

    A tensor on the CPU, one that is sharded by its user, and one of no dimension stay as they are; all do without SPMD.
    """
    if torch.compiler.is_compiling():
        return torch.ops.kp.shard_batch(tensor, mesh_shape)  # type: ignore[no-any-return]
    if tensor.device.type != "xla" or not tensor.dim() or not is_spmd():
        return tensor
    if xla.xlac()._get_xla_sharding_spec(tensor) in ("", WHOLE):
        # The public `mark_sharding` of torch_xla 2.9, without the subclass of DTensor that it returns.
        xla.xlac()._xla_mark_sharding(tensor, batch_sharding(mesh_shape, tensor.dim()))
    return tensor


def annotated(tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
    """`tensor` behind an operation that has XLA shard it."""
    result = tensor.clone()
    # torch_xla 2.9: its public `mark_sharding` fetches the tensor, which has no value while a graph is traced.
    xla.xlac()._xla_annotate_custom_sharding(result, sharding)
    return result
