"""Operands on different devices: the message for a node that Dynamo cannot trace, and the names of graph inputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.module_paths import module_of

# An argument of the user's function, and what is taken from it.
_LOCAL = re.compile(r"L\['(?!self'\])(?P<name>\w+)'\](?P<rest>(?!.*\._(?:modules|parameters|buffers)\b).*)$")
# Parts of Dynamo's source expressions that are no names of the user's. "fn" is a model with hooks, as a sharded one is.
_MODEL = ("self", "fn")
_INTERNAL = ("_modules", "_orig_mod", "_parameters", "_buffers")


def problem_of_devices(node: fx.Node) -> str | None:
    """The message for a node of Dynamo's graph whose tensors are on the CPU and on XLA; None if they are not.

    0-dim tensors on the CPU can be mixed with either, as in eager.
    """
    found = [(x, value.device) for x in node.all_input_nodes if (value := _tensor_of(x)) is not None]
    kinds = {device.type for _, device in found}
    if kinds != {"cpu", "xla"}:
        return None
    listed = ", ".join(f"{name_of_value(_given(x))} is on {device}" for x, device in found)
    module = module_of(node)
    return (
        f"the operands of {_name_of_target(node)}{f' in {module}' if module else ''} are on two devices: {listed}. "
        "Allowed: model and inputs all on the CPU, or all on the XLA device. "
        "Try: move the inputs with .to('xla'), or the model with .to('cpu')."
    )


def name_of_value(node: fx.Node) -> str:
    """The name of a graph input in Python ("x", "layers.0.weight"); for a computed value, that of its node."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name
    parts = re.sub(r"""\[['"]?([^\]'"]*)['"]?\]""", r".\1", source.name()).split(".")
    names = [part for part in parts if part not in _INTERNAL]
    names = names[1:] if names[0] in ("L", "G") else names
    return ".".join(names[1:] if len(names) > 1 and names[0] in _MODEL else names)


def python_text(node: fx.Node) -> str:
    """A graph input as the user's code writes it: "batch['input_ids']"; a parameter as `name_of_value` names it."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    found = _LOCAL.match(source.name()) if source is not None else None
    return found["name"] + found["rest"] if found else name_of_value(node)


def _given(node: fx.Node) -> fx.Node:
    """What the user passed, for an argument that a sharded model divides over the devices."""
    return node.all_input_nodes[0] if node.target is torch.ops.kp.shard_batch else node


def _tensor_of(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) and (value.dim() or value.device.type != "cpu") else None


def _name_of_target(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
