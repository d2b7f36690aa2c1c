"""`XLADistributedTraining`: a model on all devices of the process, and collectives over the processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.api import process_group
from kp_dynamo.api.models import checked_model, move
from kp_dynamo.api.xla_device_manager import XLADeviceManager
from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.lowering import spmd

REDUCTIONS = ("sum", "mean", "min", "max", "product")


class XLADistributedTraining:
    """A wrapper for training over all devices, and collectives.

    Under SPMD (see `XLADeviceManager`) one process drives all devices, and a tensor is whole to whoever reads it: a
    wrapped model shares its batch among the devices, XLA adds what they must tell each other, and the gradients are
    those of the whole batch. Collectives are between processes, which torch.distributed joins: XLA tensors travel as
    copies on the CPU. In a job of one process each is what its name says for a world of one, so that code written for
    several runs unchanged, under SPMD too.

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

        Under SPMD every device has its parameters, and works on its part of the batch: of the tensors that the model
        is called with, those whose dimension 0 is as long as that of the first. A batch that cannot be shared evenly
        gives the same results; some devices have less to do then.

        Copies of the model, `torch.save` among them, share their batch too; without SPMD they do nothing. What was
        compiled before is captured again: Dynamo does not see that the model has changed.

        In a job of several processes all get the parameters and buffers of process 0; gradients are the user's to
        reduce.

        Raises:
            TPUModelPreparationError: It is no module, or cannot be moved.
            TPUDistributedError: Nothing joins the processes of the job.
        """
        is_joined = self._is_joined()
        module = checked_model(model)
        moved = move(model, self.device_manager.device)
        if is_joined:
            process_group.copy_from_first([*module.parameters(), *module.buffers()])
        if self.device_manager.is_spmd:
            _have_shared(module, self.mesh_shape)
        return moved

    def shard_batch(self, data: Any) -> Any:
        """A copy of `data` (a tensor, or dicts, lists and tuples of them, nested) on the device.

        Under SPMD a device is sent its part of the batch only, of the tensors that `wrap_model` names; without this
        it is sent the whole, of which it uses its part.

        Raises:
            TPUDistributedError: There is no tensor in it.
        """
        device = self.device_manager.device
        moved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), data)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(moved)):
            raise TPUDistributedError(f"there is no tensor in the data, a {type(data).__name__}; allowed: tensors")
        return _shared(moved, self.mesh_shape) if self.device_manager.is_spmd else moved

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The reduction of the tensors that all processes give, as a new tensor.

        Args:
            tensor: Stays as it is.
            op: "sum", "mean", "min", "max" or "product".

        Raises:
            TPUDistributedError: Another op, no tensor, or nothing joins the processes of the job.
        """
        if op not in REDUCTIONS:
            raise TPUDistributedError(f"op is {op!r}; allowed: {', '.join(REDUCTIONS)}")
        return process_group.all_reduce(_tensor(tensor), op) if self._is_joined() else _tensor(tensor).clone()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors that all processes give, one after the other along dimension 0, as a new tensor.

        Raises:
            TPUDistributedError: No tensor, one without dimensions, or one unlike those of other processes; or nothing
                joins the processes of the job.
        """
        if _tensor(tensor).dim() == 0:
            raise TPUDistributedError("the tensor has no dimension to gather along; give tensor.reshape(1)")
        return process_group.all_gather(tensor) if self._is_joined() else tensor.clone()

    def barrier(self) -> None:
        """Wait until every process has come here and its device is done."""
        is_joined = self._is_joined()
        self.device_manager.sync_all_devices()
        if is_joined:
            process_group.barrier()

    def _checked_mesh(self, mesh_shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if self.device_manager.is_spmd:
            return spmd.checked_mesh((self.device_manager.num_devices,) if mesh_shape is None else mesh_shape)
        if mesh_shape is not None:
            raise TPUDistributedError(
                f"mesh_shape is {mesh_shape!r}, but programs run on one device. Ask for all with topology=POD, or call "
                "torch_xla.runtime.use_spmd() before anything uses the device."
            )
        return (1,)

    def _is_joined(self) -> bool:
        """Whether there are other processes, that can be spoken to."""
        if self.is_distributed:
            process_group.require_carrier(self.device_manager.world_size)
        return self.is_distributed


@dataclass(frozen=True)
class _Shares:
    """A hook before a model's forward, which shares its arguments among the devices."""

    mesh_shape: tuple[int, ...]

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _shared((args, kwargs), self.mesh_shape)


@cache
def _shares(mesh_shape: tuple[int, ...]) -> tuple[int, _Shares]:
    """The hook for all models, and its number in each: Dynamo compiles code again for another one of either."""
    hook = _Shares(mesh_shape)
    return nn.Module().register_forward_pre_hook(hook, with_kwargs=True).id, hook


def _have_shared(module: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    """Have the arguments of `module` shared along this mesh, and along no other one."""
    number, hook = _shares(mesh_shape)
    before = {at: other for at, other in module._forward_pre_hooks.items() if isinstance(other, _Shares)}
    if before == {number: hook}:
        return
    for at in before:
        del module._forward_pre_hooks[at], module._forward_pre_hooks_with_kwargs[at]
    module._forward_pre_hooks[number] = hook
    module._forward_pre_hooks_with_kwargs[number] = True
    torch._dynamo.reset()  # torch 2.9 compares no hooks before it runs what it has compiled


def _shared(data: Any, mesh_shape: tuple[int, ...]) -> Any:
    """`data` with its batch shared among the devices: dimension 0 of tensors that have as much of it as the first."""
    lengths = [t.shape[0] for t in pytree.tree_leaves(data) if isinstance(t, torch.Tensor) and t.dim()]

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        is_of_batch = tensor.dim() > 0 and tensor.shape[0] == lengths[0]
        return spmd.shard_batch(tensor, mesh_shape) if is_of_batch else tensor

    return pytree.tree_map_only(torch.Tensor, shared, data)


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TPUDistributedError(f"{type(value).__name__} cannot be sent; allowed: a tensor")
    return value
