"""The tensors that Dynamo's graph holds itself, as inputs of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kp_dynamo.exceptions import TPUDeviceError


def lift_held_tensors(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Turn the parameters and buffers that `gm` holds (in a compiled optimizer step) into its first inputs.

    Returns:
        A copy of `gm` that takes them, and the tensors in the order of the new inputs.

    Raises:
        TPUDeviceError: `gm` calls whole modules, whose tensors cannot be lifted.
    """
    held = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    if any(node.op == "call_module" for node in gm.graph.nodes):
        raise TPUDeviceError(
            f"the captured graph calls modules that hold {len(held)} tensors on the XLA device. Allowed: graphs that "
            "take them as inputs. Try: torch._dynamo.config.inline_inbuilt_nn_modules = True, the default."
        )
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    sources: Any = gm._param_name_to_source
    lifted = {name: _input(graph, name.replace(".", "_"), sources[name]) for name in held}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.target in lifted:
            new[node] = lifted[str(node.target)]
            new[node].meta.update(node.meta)
        elif node.op == "placeholder":
            new[node] = _input(graph, str(node.target), node._dynamo_source)
            new[node].meta.update(node.meta)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    copy._param_name_to_source = {}  # type: ignore[assignment]
    return copy, list(held.values())


def _input(graph: fx.Graph, name: str, source: Any) -> fx.Node:
    node = graph.placeholder(name)
    # AOTAutograd reads the source of every input of Dynamo's graph.
    node._dynamo_source = source
    return node
