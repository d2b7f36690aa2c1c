"""The shardings of tensors: read them, and set and trace them.

A tensor on torch_xla's virtual device has its full shape for its readers, and is placed on the devices by its sharding.
XLA partitions a program for the shardings of its arguments, so they are part of its key, but its results do not depend
on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.lowering.pending import run_pending
from kp_dynamo.lowering.spmd import WHOLE, is_spmd, replicated


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
