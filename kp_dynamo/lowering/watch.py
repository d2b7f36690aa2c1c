"""Record the programs that torch_xla's own bridge would compile, without compiling or running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

from kp_dynamo.compat import xla
from kp_dynamo.lowering.fake_run import ExportedProgram


@contextmanager
def watch_programs(receive: Callable[[ExportedProgram], None]) -> Iterator[None]:
    """Pass every program that `torch_xla._dynamo.dynamo_bridge` compiles to `receive`; torch_xla 2.9.

    XLA:CPU neither compiles nor runs them, because that takes minutes at a length of 2048. A run returns zeros of the
    right shapes, also for other threads that compile with openxla meanwhile. Programs compiled before run as usual. If
    the bridge splits a graph, only its first program gets the graph. Runs are counted.
    """
    # torch's openxla backend imports the bridge from the second module, which holds the names of the first.
    from torch_xla._dynamo import dynamo_bridge
    from torch_xla.core import dynamo_bridge as bridge_of_torch

    xlac = xla.xlac()
    extract = dynamo_bridge.extract_compiled_graph
    graphs: list[fx.GraphModule] = []
    programs: dict[Any, ExportedProgram] = {}
    results: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def extract_watched(gm: fx.GraphModule, args: Any) -> Any:
        graphs.append(_copied(gm))  # the bridge fuses nodes of the graph itself
        return extract(gm, args)

    def warm_up_watched(tensors: Any, _devices: Any) -> None:
        stablehlo: bytes = xlac._get_stablehlo(tensors, xlac._xla_get_default_device(), [], True)
        gm = graphs.pop() if graphs else fx.GraphModule({}, _nothing())
        key = xlac._get_graph_hash(tensors)
        programs[key] = ExportedProgram("graph", stablehlo, {}, 0.0, gm)
        results[key] = [(tensor.shape, tensor.dtype) for tensor in tensors]
        receive(programs[key])

    def run_watched(key: Any, inputs: Any) -> list[torch.Tensor]:
        if key not in programs:  # compiled before
            return list(xlac._run_cached_graph(key, inputs))
        programs[key].num_runs += 1
        return [torch.zeros(shape, dtype=dtype, device=xla.device()) for shape, dtype in results[key]]

    watched = _Instead(xlac, _xla_warm_up_cache=warm_up_watched, _run_cached_graph=run_watched)
    with (
        mock.patch.object(dynamo_bridge, "extract_compiled_graph", extract_watched),
        mock.patch.object(bridge_of_torch, "extract_compiled_graph", extract_watched),
        # Only for the bridge: graphs of kp_tpu in other threads still compile and run.
        mock.patch.object(dynamo_bridge, "torch_xla", _Instead(dynamo_bridge.torch_xla, _XLAC=watched)),
    ):
        yield


class _Instead:
    """A module with some of its functions replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def _nothing() -> fx.Graph:
    graph = fx.Graph()
    graph.output(())
    return graph
