"""XLA's compiler flags: set them before the client starts, and refuse unknown ones, on which XLA aborts the process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from kp_dynamo.compat import xla
from kp_dynamo.exceptions import TPUConfigurationError

_COMMAND = [sys.executable, "-W", "ignore", "-c", "import torch_xla; torch_xla.device()"]
_SECONDS = 120


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
    if of_xla := [flag for flag in missing if _variable(flag) == "XLA_FLAGS"]:
        _require_known(of_xla)
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
    return "LIBTPU_INIT_ARGS" if flag.startswith("--xla_tpu") else "XLA_FLAGS"


def _require_known(flags: Sequence[str]) -> None:
    """Raise TPUConfigurationError if a client on XLA's CPU device starts without these flags but not with them.

    Takes about 10 s. If the client takes longer than two minutes, the flags are accepted unchecked.
    """
    problem = _problem(tuple(flags))
    if problem and not _problem(()):
        raise TPUConfigurationError(
            f"xla_flags={' '.join(flags)!r} is invalid: XLA does not start with it: {problem}. "
            "Try: correct the flag, or omit it. Flags of the TPU compiler start with --xla_tpu."
        )


@cache
def _problem(flags: tuple[str, ...]) -> str:
    """The first XLA error line with these flags, without time stamp and source location; "" if it starts."""
    both = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(flags)}".strip()
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": both}
    try:
        done = subprocess.run(_COMMAND, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    lines = done.stderr.splitlines() or ["it exits without a message"]
    errors = [line.partition("] ")[2] for line in lines if "] " in line and (": E " in line or ": F " in line)]
    return [*errors, lines[-1]][0] if done.returncode else ""
