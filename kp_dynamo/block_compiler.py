"""`compile_blocks(model)`: repeated child modules compiled by themselves, so that Dynamo captures one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kp_dynamo.blocks.block_calls import BlockForward, BlockGroup
from kp_dynamo.blocks.child_modules import repeated_children
from kp_dynamo.compat.module_calls import call_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError

logger = logging.getLogger(__name__)


def compile_blocks(model: nn.Module, *, options: dict[str, Any] | None = None) -> nn.Module:
    """Compile a model in place, its repeated child modules by themselves.

    Dynamo captures one of several equal children, however many there are. What stands before, between and after them
    is compiled as well. `state_dict`, hooks, `named_modules`, copies and pickles of the model stay as they are; copies
    are not compiled. Sizes that vary from call to call are compiled one by one, as with `dynamic=False`.

    Args:
        model: A module, on the CPU or on the XLA device.
        options: As for `torch.compile(model, backend="kp_tpu", options=options)`, without `buckets`.

    Returns:
        `model`.

    Raises:
        TPUConfigurationError: `model` is no module or is compiled, or `options` are invalid.
    """
    _require_uncompiled(model)
    if CompileOptions.from_dict(options).buckets is not None:
        raise TPUConfigurationError(
            "compile_blocks got the option buckets. Allowed: all other options. Try: torch.compile(model, "
            "backend='kp_tpu', options=...), which finds repeated layers as well."
        )

    def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(forward, backend="kp_tpu", options=options, dynamic=False)

    found = list(repeated_children(model))
    for name, children in found:
        group = BlockGroup(name, compile_forward)
        for child in children:
            child.forward = BlockForward(child, group)
    if not found:
        logger.warning("compile_blocks found no repeated child modules in a %s; compiled whole.", type(model).__name__)
    model._compiled_call_impl = compile_forward(call_of(model))  # as model.compile() does
    return model


def _require_uncompiled(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TPUConfigurationError(f"compile_blocks got {type(model).__name__}. Allowed: a torch.nn.Module.")
    parts = [name or "the model itself" for name, part in model.named_modules() if _is_compiled(part)]
    if parts:
        raise TPUConfigurationError(
            f"compile_blocks got a module that is compiled already: {parts[0]}. Allowed: a module that torch.compile "
            "and compile_blocks have not seen. Try: use it as it is, or copy.deepcopy(model), which is not compiled."
        )


def _is_compiled(module: nn.Module) -> bool:
    return (
        module._compiled_call_impl is not None
        or isinstance(module, torch._dynamo.OptimizedModule)
        or isinstance(vars(module).get("forward"), BlockForward)
    )
