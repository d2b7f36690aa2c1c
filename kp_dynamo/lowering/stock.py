"""torch_xla's own bridge as a `Lowering`, for differential tests.

It has torch_xla's bugs, which the documentation lists. It is never the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.compat import xla
from kp_dynamo.compat.lock import LOCK
from kp_dynamo.lowering.base import Executable, LoweringSpec
from kp_dynamo.lowering.constants import device_constants
from kp_dynamo.sharding.placement import Placement


class Stock:
    """`torch_xla._dynamo.dynamo_bridge` as torch_xla 2.9 ships it. It traces with the real arguments."""

    name = "stock"

    def compile(self, gm: fx.GraphModule, args: Sequence[Any], spec: LoweringSpec) -> Executable:
        return Executable(_StockRun(gm), num_programs=1)

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        return None  # the bridge has no operators that place a tensor


class _StockRun:
    """Compiles at the first run, because the bridge needs the real arguments and runs the graph on them."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._compiled: Any = None

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        from torch_xla._dynamo.dynamo_bridge import extract_compiled_graph

        on_device = tuple(_to_device(v) for v in values)
        if self._compiled is None:
            with LOCK, torch.no_grad():
                self._compiled = extract_compiled_graph(_move_to_device(self._gm), on_device)
        results = self._compiled(*on_device)
        return list(results) if isinstance(results, (list, tuple)) else [results]


def _to_device(value: Any) -> Any:
    return value.to(xla.device()) if isinstance(value, torch.Tensor) else value


def _move_to_device(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` whose `device=` arguments and tensor attributes are on the XLA device."""
    copy = fx.GraphModule(gm, fx.Graph())
    copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
    for node in copy.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _device_argument)
    for name, tensor in device_constants(gm).items():
        setattr(copy, name, tensor)
    copy.recompile()
    return copy


def _device_argument(value: Any) -> Any:
    return xla.device() if isinstance(value, torch.device) else value
