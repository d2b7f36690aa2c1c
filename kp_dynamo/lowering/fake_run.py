"""A run of exported programs on fake tensors: it only says which programs run, with which shardings, and what is held.

For several chips, a `Placer` says how the arguments and results of each call lie on them. This is known at a call, not
at compile time: a program is then passed on at its first call, once for each combination of shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kp_dynamo.graph.module_paths import modules_of
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.lowering.known_results import known_number, set_known
from kp_dynamo.lowering.spmd import WHOLE
from kp_dynamo.lowering.step_memory import Live, Owner, StepMemory
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import Placement


@dataclass
class ExportedProgram:
    """One program for another compiler.

    Attributes:
        name: Name of its graph: "forward", "backward", "inference".
        stablehlo: A portable artifact (MLIR bytecode).
        origins: Name of an operation in it -> (ATen operator, the user's source line).
        seconds: Time spent tracing it.
        gm: The graph that it computes.
        num_runs: Number of calls. Equal graphs share a program, which is exported once.
        donated: Its parameters whose buffers its results may reuse.
        held_bytes: The most that the step holds beside its arguments when it is called, without padding.
        inputs: For each of its parameters, the position of the graph's argument; None for a seed or a constant.
        results: For each of its results, the position of the first result of the graph that it is.
        input_shardings: For each of its parameters, how it lies on several chips, in XLA's notation; () for one chip.
        result_shardings: The same for each of its results.
    """

    name: str
    stablehlo: bytes
    origins: dict[str, tuple[str, str]]
    seconds: float
    gm: fx.GraphModule
    num_runs: int = 0
    donated: tuple[int, ...] = ()
    held_bytes: int = 0
    inputs: tuple[int | None, ...] = ()
    results: tuple[int, ...] = ()
    input_shardings: tuple[str, ...] = ()
    result_shardings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramRun:
    """One run of a program in a step.

    Attributes:
        program: The program.
        held_bytes: What the step holds beside the arguments of the program meanwhile.
        live: What the step holds meanwhile, the arguments too, tensor by tensor.
    """

    program: ExportedProgram
    held_bytes: int
    live: Live = ()


@dataclass(frozen=True)
class GraphCall:
    """One call of a graph in a step on several chips."""

    gm: fx.GraphModule
    spec: LoweringSpec
    args: Sequence[Any]
    results: Sequence[Any]


class Placer(Protocol):
    """How the tensors of a step lie on several chips."""

    @property
    def mesh(self) -> NamedMesh:
        """The mesh of the chips."""
        ...

    def placement_of(self, value: Any) -> Placement | None:
        """The placement of a tensor, None if it is unknown."""
        ...

    @property
    def kernel_parts(self) -> int:
        """Among how many chips the heads of all sequences are divided in a kernel."""
        ...

    def place(self, call: GraphCall) -> tuple[Sequence[str], Sequence[str]]:
        """The shardings of the arguments and of the results of a call, in XLA's notation."""
        ...

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """The bytes that one chip holds of a tensor."""
        ...

    def receive(self, program: ExportedProgram, placed: ExportedProgram) -> None:
        """Take a program with its shardings, at its first call; `program` is the one without."""
        ...


class FakeRun:
    """Returns fake tensors with the shapes of a graph's results, without running the graph."""

    def __init__(
        self, gm: fx.GraphModule, programs: Sequence[ExportedProgram], memory: StepMemory, runs: list[ProgramRun]
    ) -> None:
        self._gm, self._programs, self._memory, self._runs = gm, programs, memory, runs
        returned = gm.graph.output_node().args[0]
        self._nodes = returned if isinstance(returned, (list, tuple)) else [returned]
        self._inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._num_calls = 0
        self._placer: tuple[Placer, LoweringSpec] | None = None
        self._placed: dict[Any, list[ExportedProgram]] = {}

    def place_by(self, placer: Placer, spec: LoweringSpec) -> None:
        """Run on several chips from now on."""
        self._placer = placer, spec

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        results = self._results(args)
        programs = self._programs if self._placer is None else self._placed_programs(args, results)
        beside = self._memory.beside(args)
        for program in programs:
            self._runs.append(ProgramRun(program, beside, self._memory.computed))
            program.num_runs += 1
        self._memory.add(results, self._owners())
        self._num_calls += 1
        return results

    def _owners(self) -> list[Owner]:
        """What each result of this call is."""
        program = self._programs[0] if self._programs else None
        kind = "gradients" if program is not None and program.name == "backward" else "activations"
        return [Owner(kind, _path(node), program, self._num_calls) for node in self._nodes]

    def _placed_programs(self, args: Sequence[Any], results: Sequence[Any]) -> list[ExportedProgram]:
        """The programs for the shardings of a call."""
        assert self._placer is not None
        placer, spec = self._placer
        shardings = tuple(map(tuple, placer.place(GraphCall(self._gm, spec, args, results))))
        if shardings not in self._placed:
            placed = [_with_shardings(program, *shardings) for program in self._programs]
            self._placed[shardings] = placed
            for pair in zip(self._programs, placed, strict=True):
                placer.receive(*pair)
        return self._placed[shardings]

    def _results(self, args: Sequence[Any]) -> list[Any]:
        if any(_is_symbolic(node) for node in self._nodes):
            return list(self._gm(*args))  # on fake tensors: this only computes the sizes of this call
        given = dict(zip(self._inputs, args, strict=True))
        return [given[node] if node in given else _fake_like(node) for node in self._nodes]


def _with_shardings(program: ExportedProgram, args: tuple[str, ...], results: tuple[str, ...]) -> ExportedProgram:
    inputs = tuple(WHOLE if position is None else args[position] for position in program.inputs)
    return replace(
        program, num_runs=0, input_shardings=inputs, result_shardings=tuple(results[p] for p in program.results)
    )


def _path(node: Any) -> str:
    """The path of the innermost module that a node was traced in."""
    stack = modules_of(node) if isinstance(node, fx.Node) else []
    return stack[-1][0] if stack else ""


def _is_symbolic(node: Any) -> bool:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _fake_like(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    known = known_number(node) if isinstance(node, fx.Node) else None
    if known is not None and isinstance(fake, FakeTensor):
        set_known(fake, known)
    return fake
