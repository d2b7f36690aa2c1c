"""Runs a command with a time limit; on timeout it is killed with all its child processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from kp_dynamo.exceptions import XLACompilationTimeoutError


def run_limited(command: Sequence[str], seconds: float) -> int:
    """Run `command` on this process's streams and return its exit code.

    Raises:
        XLACompilationTimeoutError: It exceeded the limit and was killed.
    """
    # A new session is a new process group, which also contains the TPU compiler, a grandchild.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise XLACompilationTimeoutError(
            f"it took longer than the time it was given, {seconds:g} s, and was stopped. Raise the limit, or compile a "
            "smaller model (fewer layers are enough to compare options)."
        ) from None
    finally:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group if the process is still running, also on Ctrl-C."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
