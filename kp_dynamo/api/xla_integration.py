"""`create_xla_integration`: the three XLA classes for one configuration."""

from __future__ import annotations

from kp_dynamo.api.xla_device_manager import XLADeviceManager
from kp_dynamo.api.xla_distributed_training import XLADistributedTraining
from kp_dynamo.api.xla_optimizations import XLAOptimizations
from kp_dynamo.config.tpu_config import TPUConfig


def create_xla_integration(tpu_config: TPUConfig) -> tuple[XLADeviceManager, XLADistributedTraining, XLAOptimizations]:
    """Create the device manager, the distributed training and the model optimizations for one configuration.

    Raises:
        TPUBackendError: Whatever `XLADeviceManager` raises.
    """
    devices = XLADeviceManager(tpu_config)
    return devices, XLADistributedTraining(devices), XLAOptimizations(tpu_config)
