"""The lowering of a graph whose program an earlier process has traced: XLA compiles it, or the disk cache has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.lowering.base import Executable, LoweringSpec, PortableProgram
from kp_dynamo.lowering.program import compile_portable
from kp_dynamo.sharding.placement import Placement


class StoredProgram:
    """Compiles one program, whatever the graph."""

    name = "stored"

    def __init__(self, program: PortableProgram) -> None:
        self._program = program

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        run, _, seconds, _, portable, _ = compile_portable(self._program, spec)
        return Executable(run, num_programs=1, seconds=seconds, portable=portable)

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        return None  # no capture of several devices is stored
