"""Checks XLA flags in a separate process, because XLA aborts the process on an unknown flag."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from kp_dynamo.exceptions import TPUConfigurationError

_COMMAND = [sys.executable, "-W", "ignore", "-c", "import torch_xla; torch_xla.device()"]
_SECONDS = 120


def require_known(flags: Sequence[str]) -> None:
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
