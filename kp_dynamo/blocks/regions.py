"""The state of the process at each position of Dynamo's graph: autocast, grad mode, levels of torch.func."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from kp_dynamo.capture.xla_autocast import ENTER_AUTOCAST

EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
SET_GRAD = torch._C._set_grad_enabled
_WITHOUT_STATE = ("_log_api_usage_once", "lazy_load_decompositions")


@dataclass(frozen=True)
class Region:
    """The state in which a node runs.

    Attributes:
        autocasts: The nodes that entered the open autocast regions, outermost first.
        grad: Whether gradients are recorded.
        level: How many transforms of torch.func (vmap, grad, ...) are open. A graph cannot be divided inside one.
    """

    autocasts: tuple[fx.Node, ...]
    grad: bool
    level: int = 0


def regions(nodes: Sequence[fx.Node]) -> list[Region]:
    """The region before each node, and after the last."""
    found = [Region((), torch.is_grad_enabled())]
    for node in nodes:
        found.append(_after(found[-1], node))
    return found


def _after(region: Region, node: fx.Node) -> Region:
    if node.target is ENTER_AUTOCAST:
        return replace(region, autocasts=(*region.autocasts, node))
    if node.target is EXIT_AUTOCAST:
        return replace(region, autocasts=tuple(entered for entered in region.autocasts if entered is not node.args[0]))
    if node.target is SET_GRAD:
        return replace(region, grad=bool(node.args[0]))
    name = name_of(node)
    opened = name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
    return replace(region, level=region.level + opened) if opened else region


def changes_other_state(node: fx.Node) -> bool:
    """Whether a call only changes the state of the process, in a way that a `Region` does not hold.

    For example hooks of saved tensors. Only calls outside of transforms of torch.func are to be asked.
    """
    if node.op != "call_function" or node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD):
        return False
    if name_of(node) in _WITHOUT_STATE or is_level_of_torch_func(node):
        return False
    module = str(getattr(node.target, "__module__", None))
    is_internal = module.startswith(("torch._C", "torch._functorch", "torch.autograd"))
    return is_internal and not tree_leaves(node.meta.get("example_value"))


def is_level_of_torch_func(node: fx.Node) -> bool:
    """Whether a call opens or closes a transform of torch.func."""
    return name_of(node).endswith("crement_nesting")


def name_of(node: fx.Node) -> str:
    """The name of the function that a node calls."""
    return str(getattr(node.target, "__name__", ""))
