"""A compiled graph as plain values and a module, and a compiled graph from them in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.graph.nodes import EAGER_STRIDES
from kp_dynamo.lowering import Executable, LoweringSpec, PortableProgram, StoredProgram
from kp_dynamo.runtime.compiled_graph import CompiledGraph, GraphContract, Runtime

Value = tuple[str, list[int], list[int]]
"""Dtype, sizes and strides of a tensor."""


class NotStorableError(Exception):
    """A graph has something that plain values do not describe."""


@dataclass(frozen=True)
class StoredGraph:
    """One graph, as plain values besides the module.

    Attributes:
        inputs: Its arguments.
        results: What the caller sees, on the CPU; None for no tensor, and for a tensor without strides.
        eager_strides: Strides of results in eager, by position, where they differ from the results' own.
        spec: Fields of its `LoweringSpec`.
        parameters: See `PortableProgram`; `outputs` and `num_draws` too.
    """

    inputs: list[Value]
    results: list[Value | None]
    eager_strides: dict[str, list[int]]
    spec: dict[str, Any]
    parameters: list[tuple[int | None, str, list[int]]]
    outputs: list[tuple[str, int | None]]
    num_draws: int

    @property
    def is_whole(self) -> bool:
        """Whether results and parameters are those that the other fields say."""
        read = [position for position, *_ in self.parameters]
        returned = [position for kind, position in self.outputs if kind in ("argument", "copy")]
        arguments = [position for position in (*read, *returned) if position is not None]
        has_results = len(self.results) == self.spec["num_returned"] <= len(self.outputs)
        return has_results and all(position in range(len(self.inputs)) for position in arguments)


def stored_graph(gm: fx.GraphModule, spec: LoweringSpec, executable: Executable | None) -> tuple[StoredGraph, bytes]:
    """A graph with its program, and the program's module.

    Raises:
        NotStorableError: It cannot be called in another process.
    """
    portable = executable.portable if executable is not None else None
    if executable is None or portable is None:
        raise NotStorableError(executable.not_portable if executable is not None else "its sizes vary")
    results: Any = gm.graph.output_node().args[0]
    values = [r.meta.get("val") if isinstance(r, fx.Node) else None for r in results]
    eager = gm.graph.output_node().meta.get(EAGER_STRIDES, {})
    graph = StoredGraph(
        inputs=[_value(n.meta.get("val")) for n in gm.graph.find_nodes(op="placeholder")],
        results=[None if v is None else _value(v) for v in values[: spec.num_returned]],
        eager_strides={str(position): list(map(int, strides)) for position, strides in eager.items()},
        spec={
            "name": spec.name,
            "num_returned": spec.num_returned,
            "matmul_precision": spec.matmul_precision,
            "strict": spec.strict,
            "identity": spec.identity,
            "overwritten": list(spec.overwritten),
        },
        parameters=[(position, dtype, list(sizes)) for position, dtype, sizes in portable.parameters],
        outputs=list(portable.outputs),
        num_draws=portable.num_draws,
    )
    if lowering_spec(graph) != replace(spec, is_portable=False, mesh=None):
        raise NotStorableError("it is lowered in an unusual way")
    return graph, portable.module


def _value(value: Any) -> Value:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise NotStorableError("a value is no tensor with strides")
    return str(value.dtype).removeprefix("torch."), list(map(int, value.shape)), list(map(int, value.stride()))


def compiled_graph(graph: StoredGraph, module: bytes, contract: GraphContract, runtime: Runtime) -> CompiledGraph:
    """The compiled graph, as if it had been traced in this process."""
    parameters = tuple((p, dtype, tuple(sizes)) for p, dtype, sizes in graph.parameters)
    outputs = tuple((kind, value) for kind, value in graph.outputs)
    program = PortableProgram(module, parameters, outputs, graph.num_draws)
    return CompiledGraph(_stand_in(graph), contract, StoredProgram(program), lowering_spec(graph), runtime)


def lowering_spec(graph: StoredGraph) -> LoweringSpec:
    """How the graph was lowered."""
    fields: Mapping[str, Any] = graph.spec
    return LoweringSpec(**{**fields, "overwritten": tuple(fields["overwritten"])})


def _stand_in(graph: StoredGraph) -> fx.GraphModule:
    """A graph with the arguments and results of the stored one, and one operator, for what reads their metadata."""
    nodes, mode = fx.Graph(), FakeTensorMode()
    for number, value in enumerate(graph.inputs):
        nodes.placeholder(f"arg{number}").meta["val"] = _fake(value, mode)
    results = [None if value is None else _result(nodes, i, value, mode) for i, value in enumerate(graph.results)]
    output = nodes.output((*results, *(None for _ in graph.outputs[len(results) :])))
    output.meta[EAGER_STRIDES] = {int(position): tuple(strides) for position, strides in graph.eager_strides.items()}
    return fx.GraphModule(torch.nn.Module(), nodes)


def _result(nodes: fx.Graph, number: int, value: Value, mode: FakeTensorMode) -> fx.Node:
    node = nodes.call_function(_stored_result, (number,))
    node.meta["val"] = _fake(value, mode)
    return node


def _stored_result(number: int) -> Any:
    raise AssertionError(f"result {number} of a stored program is computed by no operator")


def _fake(value: Value, mode: FakeTensorMode) -> torch.Tensor:
    dtype, sizes, strides = value
    with mode:
        return torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype))
