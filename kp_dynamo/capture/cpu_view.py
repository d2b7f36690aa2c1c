"""Dynamo's graph, seen as if everything were on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kp_dynamo.capture.xla_autocast import ENTER_AUTOCAST, has_autocast, rules_of_xla

_CPU = torch.device("cpu")


def retarget_to_cpu(gm: fx.GraphModule, mode: str) -> None:
    """Rewrite the device arguments of `gm`, and of the graphs inside it, from XLA to the CPU.

    Autocast regions are for a device type. If the tensors are on XLA (`mode`), a region for XLA becomes one for the
    CPU, and one for the CPU has no effect, as in eager.

    The rewrite is in place because AOTAutograd reads attributes that Dynamo set on this module and its nodes.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            moves = [node for node in module.graph.nodes if _is_move(node)]
            changed = [_rewrite_devices(node, mode) for node in module.graph.nodes]
            for node in moves:
                _copy_result(node)
            if any(changed) or moves:
                module.recompile()


def restore_autocast(gm: fx.GraphModule, mode: str) -> None:
    """Give autocast regions their devices again, in place, for a part of a rewritten graph that runs as it is."""
    if mode == "xla":
        for node in gm.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST):
            _rewrite_devices(node, mode)  # exchanges them once more


def _is_move(node: fx.Node) -> bool:
    """Whether the result is on another device type than its only tensor operand, and is therefore new memory."""
    value, sources = node.meta.get("example_value"), [n.meta.get("example_value") for n in node.all_input_nodes]
    tensors = [t for t in sources if isinstance(t, torch.Tensor)]
    is_made_of_one = node.op in ("call_function", "call_method") and len(tensors) == 1
    return is_made_of_one and isinstance(value, torch.Tensor) and value.device.type != tensors[0].device.type


def _copy_result(node: fx.Node) -> None:
    """From CPU to CPU, `to` returns the tensor itself, and a write to one would show in the other."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("clone", (node,))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


@contextlib.contextmanager
def surrounding_autocast(gm: fx.GraphModule, mode: str) -> Iterator[None]:
    """Apply the autocast state around the call of `gm`, for the device of `mode`, to the CPU, with XLA's rules."""
    if mode != "xla":
        yield
        return
    rules = rules_of_xla() if has_autocast(gm) else contextlib.nullcontext()
    enabled, dtype = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
    with rules, torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=torch.is_autocast_cache_enabled()):
        yield


def _rewrite_devices(node: fx.Node, mode: str) -> bool:
    before = node.args, node.kwargs
    if node.target is ENTER_AUTOCAST:
        swapped = {"xla": "cpu", "cpu": "xla"} if mode == "xla" else {}
        after: Any = (swapped.get(str(node.args[0]), node.args[0]), *node.args[1:]), node.kwargs
    else:
        after = fx.node.map_aggregate(before, _to_cpu)
    if before == after:  # as most are: fx takes long to set arguments
        return False
    node.args, node.kwargs = after
    return True


def _is_xla(value: Any) -> bool:
    if isinstance(value, str):
        return value == "xla" or value.startswith("xla:")
    return isinstance(value, torch.device) and value.type == "xla"


def _to_cpu(value: Any) -> Any:
    if not _is_xla(value):
        return value
    return "cpu" if isinstance(value, str) else _CPU
