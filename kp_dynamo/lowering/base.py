"""The interface of a lowering, for the layers above."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import Placement


@dataclass(frozen=True)
class LoweringSpec:
    """How to lower a graph. Every field is part of the compile key, or follows from it.

    Attributes:
        name: Name of the graph, for profilers and messages ("forward", "backward", "inference").
        num_returned: Number of results that the caller sees. Later results are saved for the backward, and may share
            memory with an argument.
        matmul_precision: "default", "high" or "highest": passes over the MXU for a float32 matmul.
        strict: Whether an operator that XLA cannot lower raises instead of running on the CPU.
        identity: Text that identifies what the graph computes: different computations never share it.
        overwritten: For each of the first results, the argument that the caller copies it over; None if the caller
            does something else with the result.
        donate: Whether results may reuse the buffers of overwritten arguments.
        is_sharded: Whether the program runs on several devices, for the shardings of its arguments.
        result_shardings: The sharding of each result in XLA's notation, "" where XLA decides; empty: it decides all.
        is_portable: Whether to compile the program from a module that other processes can compile too, if it has one.
        mesh: The mesh of the capture, whose axes the graph may name; None without one.
    """

    name: str
    num_returned: int
    matmul_precision: str
    strict: bool
    identity: str = ""
    overwritten: tuple[int | None, ...] = ()
    donate: bool = False
    is_sharded: bool = False
    result_shardings: tuple[str, ...] = ()
    is_portable: bool = False
    mesh: NamedMesh | None = None


@dataclass(frozen=True)
class PortableProgram:
    """An XLA program before it is compiled, for other processes.

    Attributes:
        module: The serialized HloModuleProto, compressed by zlib; empty if no result needs a program.
        parameters: For each parameter of the module, the argument that it is (None: the seed), its dtype and its sizes.
        outputs: Each output of the graph: what it is, and of which argument or result of the module.
        num_draws: How many random operators take a seed.
    """

    module: bytes
    parameters: tuple[tuple[int | None, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, int | None], ...]
    num_draws: int


@dataclass
class Executable:
    """A compiled graph for one set of shapes.

    Attributes:
        run: Takes the graph's arguments (XLA tensors; CPU tensors are transferred) and returns its outputs.
        num_programs: Number of its XLA programs; more than one if operators run on the CPU in between.
        fallbacks: ATen operators that run on the CPU, each with the user's source line.
        seconds: Time spent, by stage ("trace", "xla"); it grows when a piece is compiled at its first run.
        moved_bytes: Bytes that moved between device and CPU so far, for each of `fallbacks`.
        donated: Arguments whose buffers are reused for results: a run invalidates them on the device.
        kept: Overwritten arguments that are not donated, each with the reason.
        portable: What other processes can compile; None if that was not asked for, or for `not_portable`, the reason.
    """

    run: Any
    num_programs: int
    fallbacks: tuple[tuple[str, str], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    donated: tuple[int, ...] = ()
    kept: tuple[tuple[int, str], ...] = ()
    portable: PortableProgram | None = None
    not_portable: str = ""


class Lowering(Protocol):
    """Turns a functional ATen graph on CPU fake tensors into an `Executable` for the XLA device."""

    name: str

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        """Compile `gm` for the shapes of `args`, without running it."""
        ...

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        """How an argument lies on several devices; None if that is unknown, or on one device."""
        ...
