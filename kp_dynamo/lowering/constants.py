"""Copy the tensor attributes of a graph to the XLA device."""

from __future__ import annotations

from functools import reduce

import torch
from torch import fx

from kp_dynamo.compat import xla


def device_constants(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Tensor attributes of `gm` by name, copied onto the XLA device."""
    names = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    tensors = {name: value for name in names if isinstance(value := _attribute(gm, name), torch.Tensor)}
    with torch.utils._python_dispatch._disable_current_modes():
        return {name: tensor.detach().to(xla.device()) for name, tensor in tensors.items()}


def _attribute(gm: fx.GraphModule, name: str) -> object:
    return reduce(getattr, name.split("."), gm)
