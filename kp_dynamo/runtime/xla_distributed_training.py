"""`XLADistributedTraining`: collectives over the processes of a job, of which there may be one."""

from __future__ import annotations

import torch
from torch import nn

from kp_dynamo.exceptions import TPUDistributedError
from kp_dynamo.runtime.models import checked_model, move
from kp_dynamo.runtime.xla_device_manager import XLADeviceManager

REDUCTIONS = ("sum", "mean", "min", "max", "product")


class XLADistributedTraining:
    """Collectives and a wrapper for training.

    In a job of one process each is what its name says for a world of one, so that code written for several runs
    unchanged. Several are refused where the device manager is made.

    Args:
        device_manager: Knows the devices.

    Raises:
        TPUDistributedError: It is no device manager.
    """

    def __init__(self, device_manager: XLADeviceManager) -> None:
        if not isinstance(device_manager, XLADeviceManager):
            raise TPUDistributedError(
                f"device_manager is {type(device_manager).__name__}; give XLADeviceManager(config.hardware.tpu)"
            )
        self.device_manager = device_manager

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.device_manager.world_size > 1

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """`model` on the device of this process, ready for a step; in a world of one there is nothing to share.

        Raises:
            TPUModelPreparationError: It is no module, or cannot be moved.
        """
        self._require_one()
        checked_model(model)
        return move(model, self.device_manager.device)

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

    def _require_one(self) -> None:
        if self.is_distributed:
            raise TPUDistributedError(
                f"the job has {self.device_manager.world_size} processes; collectives over several are not there yet "
                "in this version. Allowed: one process with one device."
            )


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TPUDistributedError(f"{type(value).__name__} cannot be sent; allowed: a tensor")
    return value
