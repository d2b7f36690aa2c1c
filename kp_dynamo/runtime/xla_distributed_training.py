"""`XLADistributedTraining`: a model on all devices of the process, and collectives over the processes of a job."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.lowering import spmd
from kp_dynamo.runtime.models import checked_model, move
from kp_dynamo.runtime.xla_device_manager import XLADeviceManager

REDUCTIONS = ("sum", "mean", "min", "max", "product")

# Models that shard what they are called with: wrapping one again changes the mesh.
_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


class XLADistributedTraining:
    """A wrapper for training over all devices, and collectives.

    Under SPMD (see `XLADeviceManager`) one process drives all devices, and a tensor is whole to whoever reads it: a
    wrapped model shares its batch among the devices, XLA adds what they must tell each other, and the gradients are
    those of the whole batch. Collectives are between processes. In a job of one each is what its name says for a
    world of one, so that code written for several runs unchanged, under SPMD too.

    Args:
        device_manager: Knows the devices.
        mesh_shape: The devices as a grid; the batch goes along the first axis. None: one axis of all.

    Raises:
        TPUDistributedError: It is no device manager, or the mesh has more or fewer places than there are devices.
    """

    def __init__(self, device_manager: XLADeviceManager, mesh_shape: tuple[int, ...] | None = None) -> None:
        if not isinstance(device_manager, XLADeviceManager):
            raise TPUDistributedError(
                f"device_manager is {type(device_manager).__name__}; give XLADeviceManager(config.hardware.tpu)"
            )
        self.device_manager = device_manager
        self.mesh_shape = self._checked_mesh(mesh_shape)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.device_manager.world_size > 1

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """`model` on the device of this process, in place, ready for a step.

        Under SPMD every device has its parameters, and the tensors it is called with are shared: those whose
        dimension 0 is as long as that of the first one, and that their user has not sharded. A batch that cannot be
        shared evenly gives the same results; devices wait for each other then.

        Raises:
            TPUModelPreparationError: It is no module, or cannot be moved.
        """
        self._require_one()
        module = checked_model(model)
        moved = move(model, self.device_manager.device)
        if module in _hooks:
            _hooks.pop(module).remove()
        if self.device_manager.is_spmd:
            _hooks[module] = _share_batch(module, self.mesh_shape)
        return moved

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The reduction of the tensors that all processes give, as a new tensor.

        Args:
            tensor: Stays as it is.
            op: "sum", "mean", "min", "max" or "product".

        Raises:
            TPUDistributedError: Another op, or no tensor.
        """
        if op not in REDUCTIONS:
            raise TPUDistributedError(f"op is {op!r}; allowed: {', '.join(REDUCTIONS)}")
        self._require_one()
        return _tensor(tensor).clone()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors that all processes give, one after the other along dimension 0, as a new tensor.

        Raises:
            TPUDistributedError: No tensor, or one without dimensions.
        """
        if _tensor(tensor).dim() == 0:
            raise TPUDistributedError("the tensor has no dimension to gather along; give tensor.reshape(1)")
        self._require_one()
        return tensor.clone()

    def barrier(self) -> None:
        """Wait until every process has come here and its device is done."""
        self._require_one()
        self.device_manager.sync_all_devices()

    def _checked_mesh(self, mesh_shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if self.device_manager.is_spmd:
            return spmd.checked_mesh((self.device_manager.num_devices,) if mesh_shape is None else mesh_shape)
        if mesh_shape is not None:
            raise TPUDistributedError(
                f"mesh_shape is {mesh_shape!r}, but programs run on one device. Ask for all with topology=POD, or call "
                "torch_xla.runtime.use_spmd() before anything uses the device."
            )
        return (1,)

    def _require_one(self) -> None:
        if self.is_distributed:
            raise TPUDistributedError(
                f"the job has {self.device_manager.world_size} processes; collectives over several are not there yet "
                "in this version. Allowed: one process, which under SPMD drives all its devices."
            )


def _share_batch(module: nn.Module, mesh_shape: tuple[int, ...]) -> RemovableHandle:
    """Have a module shard what it is called with."""

    def share(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
        if not tensors:
            return None
        length = tensors[0].shape[0]

        def shared(tensor: torch.Tensor) -> torch.Tensor:
            is_of_batch = tensor.dim() > 0 and tensor.shape[0] == length
            return spmd.shard_batch(tensor, mesh_shape) if is_of_batch else tensor

        return pytree.tree_map_only(torch.Tensor, shared, (args, kwargs))

    return module.register_forward_pre_hook(share, with_kwargs=True)


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TPUDistributedError(f"{type(value).__name__} cannot be sent; allowed: a tensor")
    return value
