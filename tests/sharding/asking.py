"""Asks `worker.py`, a process with eight of XLA's CPU devices."""

import json
import os
import subprocess
import sys

# A gradient is a sum of about a hundred terms of float32, whose rounding is 6e-8, in another order on eight devices.
CLOSE = 1e-5


def asked(*names, **variables):
    """The answers of these checks, by default of the quick ones; with more environment variables."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", **variables}
    command = [sys.executable, "-W", "ignore", "-m", "tests.sharding.worker", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: answer for line in done.stdout.splitlines() for name, answer in json.loads(line).items()}
