"""`XLADistributedTraining`: data-parallel models on all devices of a process, and collectives between processes.

Collectives go through torch.distributed, with copies on the CPU. XLA's own collectives between processes need a runtime
that connects them, as on a TPU pod; they are untested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn

from kp_dynamo.api.batch_hook import BatchMesh, shard_arguments, sharded
from kp_dynamo.api.environment import of_type
from kp_dynamo.api.models import checked_model, move, move_data
from kp_dynamo.api.sharded_model import shard
from kp_dynamo.api.spmd_config import SPMDConfig
from kp_dynamo.api.xla_device_manager import XLADeviceManager, has_group
from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.lowering import spmd
from kp_dynamo.sharding.rules import Sharding

REDUCTIONS = ("sum", "mean", "min", "max", "product")

CARRIERS = ("gloo", "mpi")
"""Backends of torch.distributed that support CPU tensors."""


class XLADistributedTraining:
    """A wrapper for training over all devices, and collectives.

    Under SPMD (see `XLADeviceManager`) one process drives all devices, and every tensor is logically whole: a wrapped
    model shards its batch over the devices, XLA inserts the communication, and the gradients are those of the whole
    batch. Collectives run between processes through torch.distributed, which copies XLA tensors to the CPU; they raise
    a TPUDistributedError if the processes cannot communicate. In a job of one process they return a copy.

    `mesh_shape` is the shape of the device mesh, whose first axis shards the batch; None: one axis of all devices. An
    `SPMDConfig` in its place also names the axes, and says how `wrap_model` divides parameters. A mesh that does not
    fit the devices raises a TPUDistributedError.
    """

    def __init__(
        self, device_manager: XLADeviceManager, mesh_shape: tuple[int, ...] | SPMDConfig | None = None
    ) -> None:
        allowed = "an XLADeviceManager. Try: XLADeviceManager(config.hardware.tpu)"
        of_type(XLADeviceManager, "device_manager", device_manager, TPUDistributedError, allowed)
        self.device_manager = device_manager
        if mesh_shape is not None:
            self._require_spmd(f"mesh_shape={mesh_shape!r}")
        self._spmd_config = mesh_shape if isinstance(mesh_shape, SPMDConfig) else None
        given = mesh_shape.mesh_shape if isinstance(mesh_shape, SPMDConfig) else mesh_shape
        whole = (device_manager.num_devices,) if given is None else given
        self.mesh_shape = spmd.checked_mesh(whole) if device_manager.is_spmd else (1,)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.device_manager.is_distributed

    def wrap_model(self, model: nn.Module, sharding: Sharding | None = None) -> nn.Module:
        """Move `model` to the device of this process, in place, and prepare it for training.

        Under SPMD the batch is sharded, and the parameters lie as `sharding` says, which `kp_dynamo.shard` describes;
        None: as the `SPMDConfig` says, else as they lie already, a new model replicated on every device. The batch is
        every tensor argument whose dimension 0 has the length of the first tensor's. A batch that does not divide
        evenly gives the same results, but some devices have less work. Copies of the model, including those of
        `torch.save`, shard their batch too. Compiled code is captured again, because Dynamo does not notice the change
        of the model.

        In a job of several processes, all get the parameters and buffers of process 0; reducing gradients is up to
        the user.

        Raises:
            TPUModelPreparationError: It is not a module, or cannot be moved.
            TPUConfigurationError: `sharding` is invalid, or does not fit the model or the mesh.
            TPUDistributedError: A `sharding` without SPMD.
        """
        if sharding is None and self._spmd_config is not None:
            sharding = self._spmd_config.sharding
        if sharding is not None:
            self._require_spmd(f"sharding={sharding!r}")
            return shard(model, (self._spmd_config or SPMDConfig(self.mesh_shape)).mesh, sharding)
        is_joined = self._is_joined()
        module = checked_model(model)
        move(model, self.device_manager.device)
        if is_joined:
            with torch.no_grad():
                for tensor in [*module.parameters(), *module.buffers()]:
                    tensor.copy_(_carried(tensor, lambda copy: distributed.broadcast(copy, src=0)))
        if self.device_manager.is_spmd:
            shard_arguments(module, self._batch_mesh)
        return model

    def shard_batch(self, data: Any) -> Any:
        """A copy of `data` (a tensor, or nested dicts, lists and tuples of them) on the device.

        Under SPMD each device receives only its shard of the batch tensors that `wrap_model` describes. Without this
        call it receives the whole batch and uses its shard. Data without tensors raises a TPUDistributedError.
        """
        moved = move_data(data, self.device_manager.device, TPUDistributedError, copy=True)
        return moved if self._batch_mesh is None else sharded(moved, self._batch_mesh)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """A new tensor: the "sum", "mean", "min", "max" or "product" of the tensors of all processes."""
        if op not in REDUCTIONS:
            raise TPUDistributedError(f"op={op!r} is invalid. Allowed: {', '.join(REDUCTIONS)}.")
        of_type(torch.Tensor, "tensor", tensor, TPUDistributedError, "a torch.Tensor")
        if not self._is_joined():
            return tensor.clone()
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TPUDistributedError(
                f"op='mean' requires a floating-point tensor, got {tensor.dtype}. Try: op='sum', or .float()."
            )
        reduction = getattr(distributed.ReduceOp, "SUM" if op == "mean" else op.upper())
        reduced = _carried(tensor, lambda copy: distributed.all_reduce(copy, op=reduction))
        return (reduced / distributed.get_world_size() if op == "mean" else reduced).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor: those of all processes, of one shape and dtype, concatenated along dimension 0."""
        of_type(torch.Tensor, "tensor", tensor, TPUDistributedError, "a torch.Tensor")
        if tensor.dim() == 0:
            raise TPUDistributedError("a 0-d tensor has no dimension to gather along. Try: tensor.reshape(1).")
        if not self._is_joined():
            return tensor.clone()
        kinds: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(kinds, (tuple(tensor.shape), str(tensor.dtype)))
        if len(set(kinds)) > 1:
            listed = ", ".join(f"{i}: {dtype} {list(shape)}" for i, (shape, dtype) in enumerate(kinds))
            raise TPUDistributedError(f"the tensors of the processes differ ({listed}). Allowed: one shape and dtype.")
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for _ in kinds]
        _carried(tensor, lambda copy: distributed.all_gather(parts, copy))
        return torch.cat(parts).to(tensor.device)

    def barrier(self) -> None:
        """Wait until every process is here and its device is idle."""
        is_joined = self._is_joined()
        self.device_manager.sync_all_devices()
        if is_joined:
            distributed.barrier()

    @property
    def _batch_mesh(self) -> BatchMesh | None:
        """The mesh whose first axis divides the batch; None if the batch is whole on every device."""
        return BatchMesh(self.mesh_shape) if self.mesh_shape[0] > 1 else None

    def _require_spmd(self, given: str) -> None:
        if not self.device_manager.is_spmd:
            raise TPUDistributedError(
                f"{given} is invalid: programs run on one device. Try: topology=POD, or call "
                "torch_xla.runtime.use_spmd() before anything uses the device."
            )

    def _is_joined(self) -> bool:
        """Whether there are other processes; raises if they cannot communicate."""
        backend = distributed.get_backend() if has_group() else None
        if self.is_distributed and not any(name in (backend or "") for name in CARRIERS):
            found = f"torch.distributed has {f'a group of {backend!r}' if backend else 'no group'}"
            raise TPUDistributedError(
                f"the job has {self.device_manager.world_size} processes, but {found}. Allowed: a group of "
                f"{' or '.join(CARRIERS)}. Try: torch.distributed.init_process_group('gloo')."
            )
        return self.is_distributed


def _carried(tensor: torch.Tensor, send: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A contiguous copy on the CPU, after `send` has sent it or received into it, or raised TPUDistributedError."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    try:
        send(copy)
    except (RuntimeError, ValueError, TypeError) as cause:
        kind, why = f"{tensor.dtype}{list(tensor.shape)}", str(cause).splitlines()[0]
        raise TPUDistributedError(f"torch.distributed cannot send a tensor {kind}: {why}") from cause
    return copy
