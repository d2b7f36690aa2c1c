"""Powers whose base or exponent is a number that varies from call to call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_POWERS = (operator.pow, operator.ipow, torch.pow, torch.float_power, "pow", "pow_", "float_power", "float_power_")


def specialize_exponents(gm: fx.GraphModule) -> None:
    """Specialize differentiated powers on the value of such a number, in place; Dynamo guards it.

    The gradient of a power checks whether the number is 0, which torch 2.9 cannot do for a symbolic one: it fails with
    an internal assertion, or with "NYI log symbolic float".
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            powers = [n for n in module.graph.nodes if n.target in _POWERS and _is_differentiated(n)]
            for node in powers:
                node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), _fixed)
            if powers:
                module.recompile()


def _is_differentiated(node: fx.Node) -> bool:
    result = node.meta.get("example_value")
    return isinstance(result, torch.Tensor) and result.requires_grad


def _fixed(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return int(value)
    return float(value) if isinstance(value, torch.SymFloat) else node
