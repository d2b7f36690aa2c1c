"""Collectives between processes through torch.distributed's default group; XLA tensors are copied to the CPU.

XLA's own collectives between processes need a runtime that connects them, as on a TPU pod; they are untested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

from kp_dynamo.exceptions import TPUDistributedError

CARRIERS = ("gloo", "mpi")
"""Backends of torch.distributed that support CPU tensors."""


def world() -> tuple[int, int] | None:
    """World size and rank of this process; None without a process group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_world_size(), distributed.get_rank()


def require_carrier(num_processes: int) -> None:
    """Raise a TPUDistributedError if there is no process group, or its backend does not support CPU tensors."""
    backend = distributed.get_backend() if world() is not None else None
    if backend is None or not any(name in backend for name in CARRIERS):
        found = "torch.distributed has no group" if backend is None else f"torch.distributed has a group of {backend!r}"
        raise TPUDistributedError(
            f"the job has {num_processes} processes, but {found}. Allowed: a group of {' or '.join(CARRIERS)}. "
            "Try: torch.distributed.init_process_group('gloo')."
        )


def all_reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The sum, mean, min, max or product over all processes."""
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TPUDistributedError(
            f"op='mean' requires a floating-point tensor, got {tensor.dtype}. Try: op='sum', or .float()."
        )
    reduction = getattr(distributed.ReduceOp, "SUM" if op == "mean" else op.upper())
    reduced = _carried(tensor, lambda copy: distributed.all_reduce(copy, op=reduction))
    return (reduced / distributed.get_world_size() if op == "mean" else reduced).to(tensor.device)


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all processes, of one shape and dtype, concatenated along dimension 0."""
    kinds: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(kinds, (tuple(tensor.shape), str(tensor.dtype)))
    if len(set(kinds)) > 1:
        listed = ", ".join(f"{i}: {dtype} {list(shape)}" for i, (shape, dtype) in enumerate(kinds))
        raise TPUDistributedError(f"the tensors of the processes differ ({listed}). Allowed: one shape and dtype.")
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in kinds]
    _carried(tensor, lambda copy: distributed.all_gather(parts, copy))
    return torch.cat(parts).to(tensor.device)


def copy_from_first(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast the values of these tensors from process 0."""
    for tensor in tensors:
        values = _carried(tensor, lambda copy: distributed.broadcast(copy, src=0))
        with torch.no_grad():
            tensor.copy_(values)


def _carried(tensor: torch.Tensor, send: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A contiguous copy on the CPU, after `send` has sent it or received into it, or raised TPUDistributedError."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    try:
        send(copy)
    except (RuntimeError, ValueError, TypeError) as cause:
        why = str(cause).splitlines()[0]
        raise TPUDistributedError(
            f"torch.distributed cannot send a tensor {tensor.dtype}{list(tensor.shape)}: {why}"
        ) from cause
    return copy
