"""`XLADeviceManager`: the XLA devices of this process, and which of them is in use."""

from __future__ import annotations

from typing import Any

import torch

from kp_dynamo.api import process_group
from kp_dynamo.api.environment import checked_config, start_device
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUDeviceError
from kp_dynamo.lowering import spmd


class XLADeviceManager:
    """The XLA devices of this process.

    Compiled programs run on the first of them and refuse tensors of others, which run eager code. Under SPMD
    (`topology=POD`, or `torch_xla.runtime.use_spmd()`) that first device stands for all of them, and is the only one.

    Args:
        tpu_config: Which flags the client starts with, and whether programs run on one device or on all.

    Raises:
        TPUBackendError: The device cannot be had as asked, see `start_device`.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        start_device(self.config)
        self._index = 0

    @property
    def devices(self) -> list[torch.device]:
        """All of them, in order."""
        return xla.devices()

    @property
    def num_devices(self) -> int:
        """Devices of the job; under SPMD those behind `device`."""
        return xla.num_devices()

    @property
    def is_spmd(self) -> bool:
        """Whether programs run over all devices."""
        return spmd.is_spmd()

    @property
    def device(self) -> torch.device:
        """The one in use."""
        return self.devices[self._index]

    @property
    def world_size(self) -> int:
        """Processes of the job: of torch.distributed's group where there is one, else of XLA's runtime."""
        return (process_group.world() or xla.world())[0]

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return (process_group.world() or xla.world())[1]

    def set_device(self, index: int) -> torch.device:
        """Use another device from now on, and return it.

        Raises:
            TPUDeviceError: There is none of that number.
        """
        count = len(self.devices)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise TPUDeviceError(f"device {index!r} is not there; allowed: an int from 0 to {count - 1}")
        self._index = index
        return self.device

    def sync_all_devices(self) -> None:
        """Run what is pending on every device, and wait until it is done."""
        xla.synchronize(self.devices)

    def get_device_stats(self) -> dict[str, Any]:
        """The devices, and the memory of the one in use in bytes, None where the device does not count it."""
        return {
            "device": str(self.device),
            "device_kind": xla.device_kind(),
            "chip": xla.chip_name(),
            "num_devices": self.num_devices,
            "is_spmd": self.is_spmd,
            "devices": [str(device) for device in self.devices],
            "world_size": self.world_size,
            "rank": self.rank,
            "memory": xla.memory_info(self.device),
        }
