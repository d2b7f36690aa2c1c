"""`XLADeviceManager`: the XLA devices of this process and the current one."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from kp_dynamo.api.environment import checked_config, start_device
from kp_dynamo.compat import chips, xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUDeviceError
from kp_dynamo.lowering import spmd


class ProcessDevices:
    """The XLA devices of this process, and its place in the job."""

    _index = 0

    @property
    def devices(self) -> list[torch.device]:
        """All devices, in order."""
        return xla.devices()

    @property
    def device(self) -> torch.device:
        """The current device."""
        return self.devices[self._index]

    @property
    def num_devices(self) -> int:
        """Number of devices of the job; under SPMD, of the devices that `device` represents."""
        return xla.num_devices()

    @property
    def world_size(self) -> int:
        """Number of processes: of torch.distributed's group if there is one, else of XLA's runtime."""
        return distributed.get_world_size() if has_group() else xla.world()[0]

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return distributed.get_rank() if has_group() else xla.world()[1]

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1


class XLADeviceManager(ProcessDevices):
    """The XLA devices of this process.

    Compiled programs run on the first device and refuse tensors of the others, which can run eager code. Under SPMD
    (`topology=POD`, or `torch_xla.runtime.use_spmd()`) the first device represents all of them and is the only one.
    The configuration sets the flags of the client, and whether programs run on one device or on all. A device that
    cannot be used as configured raises a TPUBackendError, see `start_device`.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        start_device(self.config)

    @property
    def is_spmd(self) -> bool:
        """Whether programs run on all devices."""
        return spmd.is_spmd()

    def set_device(self, index: int) -> torch.device:
        """Set the current device and return it; an index out of range raises TPUDeviceError."""
        count = len(self.devices)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise TPUDeviceError(f"index={index!r} is invalid. Allowed: an int from 0 to {count - 1}.")
        self._index = index
        return self.device

    def sync_all_devices(self) -> None:
        """Run all pending operations of every device and wait for them."""
        xla.synchronize(self.devices)

    def get_device_stats(self) -> dict[str, Any]:
        """The devices, and the memory of the current one in bytes; None if the device does not report it."""
        return {
            "device": str(self.device),
            "device_kind": chips.device_kind(),
            "chip": chips.chip_name(),
            "num_devices": self.num_devices,
            "is_spmd": self.is_spmd,
            "devices": [str(device) for device in self.devices],
            "world_size": self.world_size,
            "rank": self.rank,
            "memory": xla.memory_info(self.device),
        }


def has_group() -> bool:
    """Whether torch.distributed has a default group."""
    return distributed.is_available() and distributed.is_initialized()
