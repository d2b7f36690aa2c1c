"""Checks on eight of XLA's CPU devices under SPMD, a property of a whole process; answers as JSON, a line a check.

`python -m tests.sharding.worker CHECK...` runs these checks, by default the quick ones. A check returns what JSON has,
or raises: then its answer is the error as text. The modules `checks_of_*` have the checks.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_xla

import kp_dynamo
from tests.sharding.registry import CHECKS, DATA, SLOW


def answer(function: Callable[[], Any]) -> Any:
    torch._dynamo.reset()
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("checks_of_*.py")):
        importlib.import_module(f"tests.sharding.{path.stem}")
    torch_xla.runtime.use_spmd()  # for the checks that call nothing of `shard` first
    kp_dynamo.shard_batch(torch.ones(8), DATA)  # starts the devices before a backward on the CPU
    for name in sys.argv[1:] or CHECKS:
        sys.stdout.write(json.dumps({name: answer((CHECKS | SLOW)[name])}) + "\n")
        sys.stdout.flush()
