"""Checks that the classes of the object API make before they use the device."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import TypeVar

from kp_dynamo.compat import chips, xla
from kp_dynamo.compat.versions import check_versions, earlier_version
from kp_dynamo.config.tpu_config import TPUConfig, TPUTopology
from kp_dynamo.config.translation import chip_of, require_enabled, require_topology
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError, TPUDistributedError
from kp_dynamo.hardware import Chip
from kp_dynamo.lowering import spmd

T = TypeVar("T")

_COMMAND = [sys.executable, "-W", "ignore", "-c", "import torch_xla; torch_xla.device()"]


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
    return chip_of(config, chips.chip_name() if xla.is_started() else None)


def xla_problem() -> str:
    """Why torch_xla cannot be used here; "" if it can."""
    try:
        check_versions()
    except TPUBackendError as problem:
        return str(problem)
    return ""


def apply_flags(flags: str | None) -> None:
    """Add compiler flags to the environment, which the client reads once, when it starts.

    Raises:
        TPUConfigurationError: The client has started without them, or XLA does not know one. Flags of the TPU compiler
            are not checked: libtpu reads them, on a machine with a TPU.
    """
    if late := late_flags(flags):
        raise TPUConfigurationError(
            f"xla_flags={' '.join(late)!r} is too late: the XLA client of this process has already started. "
            "Try: create the configuration and the first TPUBackend before anything uses the device."
        )
    missing = _missing(flags)
    of_xla = tuple(flag for flag in missing if _variable(flag) == "XLA_FLAGS")
    if of_xla and (problem := _problem(of_xla)) and not _problem(()):
        raise TPUConfigurationError(
            f"xla_flags={' '.join(of_xla)!r} is invalid: XLA does not start with it: {problem}. "
            "Try: correct the flag, or omit it. Flags of the TPU compiler start with --xla_tpu or --xla_jf."
        )
    for flag in missing:
        variable = _variable(flag)
        os.environ[variable] = f"{os.environ.get(variable, '')} {flag}".strip()


def late_flags(flags: str | None) -> list[str]:
    """The flags that are missing from a client that has already started."""
    return _missing(flags) if xla.is_started() else []


def _missing(flags: str | None) -> list[str]:
    return [flag for flag in (flags or "").split() if flag not in os.environ.get(_variable(flag), "").split()]


def _variable(flag: str) -> str:
    """The environment variable of a flag: libtpu's or XLA's."""
    return "LIBTPU_INIT_ARGS" if flag.startswith(("--xla_tpu", "--xla_jf")) else "XLA_FLAGS"


@cache
def _problem(flags: tuple[str, ...]) -> str:
    """The first XLA error line of a client on XLA's CPU device with these flags; "" if it starts, in about 10 s.

    If it takes longer than two minutes, the flags count as good.
    """
    both = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(flags)}".strip()
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": both}
    try:
        done = subprocess.run(_COMMAND, env=environment, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stderr.splitlines() or ["it exits without a message"]
    errors = [line.partition("] ")[2] for line in lines if "] " in line and (": E " in line or ": F " in line)]
    return [*errors, lines[-1]][0] if done.returncode else ""
