"""A check of `doctor`, and the self-test that some checks run in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "failed"]

SELF_TEST = (sys.executable, "-m", "kp_dynamo.cli.self_test")
_SILENCE = "Another process may hold the device, or PJRT_DEVICE may name one that is not there: CPU always is."


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Status
    message: str


def run_self_test(timeout_s: float, *arguments: str) -> tuple[dict[str, Any], str]:
    """The output of `kp_dynamo.cli.self_test`, and why it stopped early.

    The user's disk cache stays out of it: a self-test with a folder enables the cache in that one.
    """
    environment = {name: value for name, value in os.environ.items() if name != "KP_TPU_CACHE_DIR" or not arguments}
    command = [*SELF_TEST, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        return _told(output), f"nothing{' more' if output else ''} within {timeout_s:g} s. {_SILENCE}"
    return _told(done.stdout), _problem(done)


def _told(output: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return {name: value for line in lines for name, value in line.items()}


def _problem(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return last[0] if last else f"its process ended with {done.returncode}"
