"""Checks that the classes of the object API make before they use the device."""

from __future__ import annotations

from typing import TypeVar

from kp_dynamo.api.flags import apply_flags
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import check_versions, earlier_version
from kp_dynamo.config.tpu_config import TPUConfig, TPUTopology
from kp_dynamo.config.translation import chip_of, require_enabled, require_topology
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError, TPUDistributedError
from kp_dynamo.hardware import Chip
from kp_dynamo.lowering import spmd

T = TypeVar("T")


def of_type(kind: type[T], name: str, value: object, error: type[TPUBackendError], allowed: str) -> T:
    """`value`, the argument `name`, if it is a `kind`; `error` otherwise."""
    if isinstance(value, kind):
        return value
    raise error(f"{name} of type {type(value).__name__} is invalid. Allowed: {allowed}.")


def checked_config(config: TPUConfig) -> TPUConfig:
    """`config`; raises TPUConfigurationError if it has another type."""
    return of_type(TPUConfig, "config", config, TPUConfigurationError, "a TPUConfig. Try: config.hardware.tpu")


def start_device(config: TPUConfig) -> None:
    """Start the XLA client with the configured flags, and check that its devices match the configuration.

    Raises:
        TPUNotAvailableError: The configuration disables the TPU, or torch_xla is missing.
        TPUConfigurationError: The client has already started, with other flags.
        TPUDistributedError: The devices do not match the configured topology.
    """
    require_enabled(config)
    apply_flags(config.xla_flags)
    if config.topology is TPUTopology.POD and not spmd.is_spmd():
        if (version := earlier_version()) is not None:
            raise TPUDistributedError(
                f"topology=POD with torch_xla {version} is untested and therefore refused. Allowed: torch_xla 2.9."
            )
        # Check first: enabling SPMD cannot be undone, and is impossible after the first use of a device.
        require_topology(config, 1, xla.num_devices(), is_spmd=False)
        spmd.switch_on()
    xla.device()
    require_topology(config, xla.world()[0], xla.num_devices(), spmd.is_spmd())


def deciding_chip(config: TPUConfig) -> Chip:
    """The chip to compile for. Starts no device; the present chip is known only after the device has started."""
    return chip_of(config, xla.chip_name() if xla.is_started() else None)


def xla_problem() -> str:
    """Why torch_xla cannot be used here; "" if it can."""
    try:
        check_versions()
    except TPUBackendError as problem:
        return str(problem)
    return ""
