"""Checks on eight of XLA's CPU devices under SPMD, a property of a whole process; answers as JSON, a line a check.

`python -m tests.sharding.worker CHECK...` runs these checks, by default the quick ones. The modules
`checks_of_*` have them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
import torch_xla

import kp_dynamo
from tests.sharding.registry import CHECKS, DATA

if __name__ == "__main__":
    for path in sorted(Path(__file__).parent.glob("checks_of_*.py")):
        importlib.import_module(f"tests.sharding.{path.stem}")
    torch_xla.runtime.use_spmd()  # for the checks that call nothing of `shard` first
    kp_dynamo.shard_batch(torch.ones(8), DATA)  # starts the devices before a backward on the CPU
    CHECKS.run(sys.argv[1:])
