"""User settings: the options of `torch.compile`, and the configuration of the object API."""

from kp_dynamo.config.tpu_config import (
    HardwareConfig,
    KernelPyTorchConfig,
    TPUCompilationMode,
    TPUConfig,
    TPUTopology,
    TPUVersion,
)

__all__ = [
    "HardwareConfig",
    "KernelPyTorchConfig",
    "TPUCompilationMode",
    "TPUConfig",
    "TPUTopology",
    "TPUVersion",
]
