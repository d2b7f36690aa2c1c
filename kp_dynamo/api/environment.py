"""What the classes of the object API ask before they use the device."""

from __future__ import annotations

import os

from kp_dynamo.api import flag_check
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.config.tpu_config import KernelPyTorchConfig, TPUConfig, TPUTopology
from kp_dynamo.config.translation import chip_of, require_enabled, require_topology
from kp_dynamo.exceptions import TPUConfigurationError, TPUDistributedError
from kp_dynamo.hardware import Chip
from kp_dynamo.lowering import spmd


def whole_config(config: KernelPyTorchConfig | None) -> KernelPyTorchConfig:
    """`config`, or the defaults.

    Raises:
        TPUConfigurationError: It is something else.
    """
    if config is None:
        return KernelPyTorchConfig()
    if not isinstance(config, KernelPyTorchConfig):
        raise TPUConfigurationError(f"config is {type(config).__name__}; allowed: a KernelPyTorchConfig, None")
    return config


def checked_config(config: TPUConfig) -> TPUConfig:
    """`config`, if it is one of a TPU.

    Raises:
        TPUConfigurationError: It is something else.
    """
    if not isinstance(config, TPUConfig):
        raise TPUConfigurationError(f"the configuration is {type(config).__name__}; give config.hardware.tpu")
    return config


def start_device(config: TPUConfig) -> None:
    """Start the XLA client with the flags of the configuration, and see that it can do what is asked.

    Raises:
        TPUNotAvailableError: The configuration switches the TPU off, or there is no torch_xla.
        TPUConfigurationError: The client has started already, with other flags.
        TPUDistributedError: The devices are not those that the configuration asks for.
    """
    require_enabled(config)
    apply_flags(config.xla_flags)
    if config.topology is TPUTopology.POD and not spmd.is_spmd():
        if (version := earlier_version()) is not None:
            raise TPUDistributedError(
                f"topology=POD with torch_xla {version}, where several devices were not tried. Allowed: torch_xla 2.9."
            )
        # Before SPMD is switched on, which cannot be taken back, and which the first use of a device forestalls.
        require_topology(config, 1, xla.num_devices(), is_spmd=False)
        spmd.switch_on()
    xla.device()
    require_topology(config, xla.world()[0], xla.num_devices(), spmd.is_spmd())


def deciding_chip(config: TPUConfig) -> Chip:
    """The chip whose memory and tiles decide; starts no device, and knows of the present one once it has started."""
    return chip_of(config, xla.chip_name() if xla.is_started() else None)


def apply_flags(flags: str | None) -> None:
    """Add compiler flags to the environment, which the client reads once, when it starts.

    Raises:
        TPUConfigurationError: It has started without them, or XLA does not know one. Those of the TPU's compiler are
            not tried: libtpu reads them where there is a TPU.
    """
    if late := late_flags(flags):
        raise TPUConfigurationError(
            f"xla_flags holds {' '.join(late)}, but the XLA client of this process has started without, and reads no "
            "more flags. Make the configuration and the first TPUBackend before anything uses the device."
        )
    missing = _missing(flags)
    if of_xla := [flag for flag in missing if _variable(flag) == "XLA_FLAGS"]:
        flag_check.require_known(of_xla)
    for flag in missing:
        variable = _variable(flag)
        os.environ[variable] = f"{os.environ.get(variable, '')} {flag}".strip()


def late_flags(flags: str | None) -> list[str]:
    """The flags that the client of this process has started without."""
    return _missing(flags) if xla.is_started() else []


def _missing(flags: str | None) -> list[str]:
    return [flag for flag in (flags or "").split() if flag not in os.environ.get(_variable(flag), "").split()]


def _variable(flag: str) -> str:
    """Where a flag belongs: libtpu's own, or all of XLA's."""
    return "LIBTPU_INIT_ARGS" if flag.startswith("--xla_tpu") else "XLA_FLAGS"
