"""Whether a program may keep the value of a constant: nobody else reads it as a tensor of its own, or writes to it."""

from __future__ import annotations

import torch
from torch import fx, nn

aten = torch.ops.aten

COPIES = (aten.lift_fresh_copy.default, aten.lift_fresh.default)
IDENTITIES = (aten.alias.default, aten.detach.default)


def reading_problem(value: torch.Tensor) -> str | None:
    """Why the value of a constant is not known when the program is compiled, or None."""
    if isinstance(value, nn.Parameter):
        return "a parameter, which its owner may change"
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
        return f"its value cannot be read: {type(value).__name__}, {value.layout}"
    if value.device.type != "cpu":
        return f"on {value.device}, not on the CPU"
    return None


def sharing_problem(node: fx.Node) -> str | None:
    """Why a write could reach the constant that `node` copies, if the copy were removed, or None."""
    for user in node.users:
        if user.op == "output":
            return "a result of the graph, which the caller may change"
        target = user.target
        if not isinstance(target, torch._ops.OpOverload):
            return f"{user.name} may write to it"
        if target._schema.is_mutable:
            return f"{user.name} writes to it"
        if (target.is_view or target in COPIES) and (problem := sharing_problem(user)):
            return problem
    return None
