"""A command that is killed when its time is over, with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from kp_dynamo.exceptions import XLACompilationTimeoutError


def run_limited(command: Sequence[str], seconds: float) -> int:
    """Run `command` on this process's streams and return its exit code.

    Raises:
        XLACompilationTimeoutError: It took longer, and was killed.
    """
    # A session of its own is a process group of its own: the TPU's compiler is a child of the child.
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
    """Leave nothing of it behind, on Ctrl-C as well; what has ended is left alone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
