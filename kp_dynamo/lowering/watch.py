"""See the programs that torch_xla's own bridge compiles, for comparison. They run as well: it knows no other way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx

from kp_dynamo import compat
from kp_dynamo.lowering.export import ExportedProgram


@contextmanager
def watch_programs(receive: Callable[[ExportedProgram], None]) -> Iterator[None]:
    """Hand every program that `torch_xla._dynamo.dynamo_bridge` compiles to `receive`; torch_xla 2.9.

    A graph that the bridge splits is named in the first of its programs. Its runs are counted.
    """
    # torch's openxla backend takes the bridge from the second, which holds the names of the first.
    from torch_xla._dynamo import dynamo_bridge
    from torch_xla.core import dynamo_bridge as bridge_of_torch

    xlac = compat.xlac()
    extract, warm_up = dynamo_bridge.extract_compiled_graph, xlac._xla_warm_up_cache
    run = xlac._run_cached_graph
    graphs: list[fx.GraphModule] = []
    programs: dict[Any, ExportedProgram] = {}

    def extract_watched(gm: fx.GraphModule, args: Any) -> Any:
        graphs.append(_copied(gm))  # the bridge fuses nodes of the graph itself
        return extract(gm, args)

    def warm_up_watched(tensors: Any, devices: Any) -> Any:
        stablehlo: bytes = xlac._get_stablehlo(tensors, xlac._xla_get_default_device(), [], True)
        gm = graphs.pop() if graphs else fx.GraphModule({}, _nothing())
        programs[xlac._get_graph_hash(tensors)] = program = ExportedProgram("graph", stablehlo, {}, 0.0, gm)
        receive(program)
        return warm_up(tensors, devices)

    def run_watched(key: Any, inputs: Any) -> Any:
        if key in programs:
            programs[key].num_runs += 1
        return run(key, inputs)

    with (
        mock.patch.object(dynamo_bridge, "extract_compiled_graph", extract_watched),
        mock.patch.object(bridge_of_torch, "extract_compiled_graph", extract_watched),
        mock.patch.object(xlac, "_xla_warm_up_cache", warm_up_watched),
        mock.patch.object(xlac, "_run_cached_graph", run_watched),
    ):
        yield


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def _nothing() -> fx.Graph:
    graph = fx.Graph()
    graph.output(())
    return graph
