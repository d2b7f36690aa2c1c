"""XLA's flags, tried in a process of their own: XLA ends the process that gives it one it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from kp_dynamo.exceptions import TPUConfigurationError

_START = "import torch_xla; torch_xla.device()"
_SECONDS = 120


def require_known(flags: Sequence[str]) -> None:
    """Start a client on XLA's CPU device with these flags, about 10 s.

    A client that takes longer than two minutes is given up, and the flags are let through.

    Raises:
        TPUConfigurationError: It does not start with them, and does without.
    """
    problem = _problem(tuple(flags))
    if problem and not _problem(()):
        raise TPUConfigurationError(
            f"xla_flags holds {' '.join(flags)}, with which XLA does not start: {problem}. Correct the flag, or leave "
            "it out; flags of the TPU's compiler begin with --xla_tpu."
        )


@cache
def _problem(flags: tuple[str, ...]) -> str:
    """What XLA says of the flags; empty where it starts."""
    both = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(flags)}".strip()
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": both}
    command = [sys.executable, "-W", "ignore", "-c", _START]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return _reason(done.stderr) if done.returncode else ""


def _reason(stderr: str) -> str:
    """The first line that is an error of XLA's, without time and place."""
    lines = stderr.splitlines()
    told = [line.partition("] ")[2] for line in lines if "] " in line and (": E " in line or ": F " in line)]
    return told[0] if told else (lines[-1] if lines else "it ends without a word")
