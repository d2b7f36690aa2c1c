"""Compiles a module as `torch.compile` does, but with repeated child modules captured once where that pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kp_dynamo.blocks.borrowed_forwards import Borrowing
from kp_dynamo.blocks.child_modules import has_own_forward, repeated_children
from kp_dynamo.compat import chips
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.lowering import device_spread, on_their_mesh

logger = logging.getLogger(__name__)


def compile_module(module: nn.Module, arguments: dict[str, Any], options: CompileOptions) -> nn.Module:
    """Compile a module. In inference, Dynamo captures one of several equal children, and `module` is unchanged.

    Args:
        module: The model.
        arguments: The arguments of `torch.compile`; the backend is this one.
        options: The options of the backend, which may be part of it already.

    Returns:
        What `torch.compile(module, **arguments)` returns.
    """
    if arguments.get("fullgraph"):
        # Otherwise Dynamo would reuse the graph breaks of an earlier compilation of this code.
        torch._dynamo.reset()
    compiled: nn.Module = torch.compile(module, **arguments)  # type: ignore[assignment]  # a module for a module
    with on_their_mesh(module.parameters()):
        spread = device_spread()
    reason = _reason_to_follow(module, arguments, options.on(chips.chip_name()).over(spread))
    found = [] if reason else list(repeated_children(module))
    if not found:
        logger.debug("%s is captured whole: %s", type(module).__name__, reason or "no repeated child modules")
        return compiled

    def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward, **arguments)

    compiled.forward = Borrowing(found, compile_forward).around(module, compiled.forward)
    return compiled


def _reason_to_follow(module: nn.Module, arguments: dict[str, Any], options: CompileOptions) -> str:
    """Why Dynamo must follow every child; "" if it need not."""
    if arguments.get("fullgraph") or arguments.get("dynamic"):
        return "fullgraph=True and dynamic=True are for one graph"
    if options.blocks == "off" or options.lowering == "stock" or earlier_version() is not None:
        return "its graph is never divided"
    if isinstance(options.blocks, int):
        return "a program has several layers"
    if options.reads_modules:
        return "passes read the paths of modules"
    if any(map(has_own_forward, module.modules())):
        return "a module has a forward of its own, or is compiled"
    if chips.chip_name() is not None and next((p.device.type for p in module.parameters()), "cpu") == "cpu":
        return "values between the children would pass through the host"
    held = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    if options.is_memory_bounded and held > options.memory_budget_bytes / 2:
        return "whether it fits the memory is only known of one graph"
    return ""
