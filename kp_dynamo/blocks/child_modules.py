"""Finds the repeated child modules of a model."""

from __future__ import annotations

import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import nn

LEAST = 2


def repeated_children(model: nn.Module, path: str = "") -> Iterator[tuple[str, list[nn.Module]]]:
    """Equal children of one parent, the outermost first: (module path, children).

    Equal are modules of one class whose parameters and buffers have equal names, shapes and dtypes. A module without
    children, such as one Linear of several, is too little for a program of its own.
    """
    alike: dict[object, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, child in model.named_children():
        alike[_form(child)].append((name, child))
    for children in alike.values():
        if len(children) >= LEAST and _is_block(children[0][1]):
            yield f"{path}{children[0][0]} to {path}{children[-1][0]}", [child for _, child in children]
        else:
            for name, child in children:
                yield from repeated_children(child, f"{path}{name}.")


def _form(module: nn.Module) -> object:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return type(module), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call of a module runs something else than the forward of its class: it is compiled, or patched."""
    is_special = isinstance(module, torch.jit.ScriptModule | torch._dynamo.OptimizedModule)
    return is_special or replaces_forward(module) or module._compiled_call_impl is not None


def replaces_forward(module: nn.Module) -> bool:
    """Whether a module holds another forward than its class; copies of a compiled block hold that of their class."""
    own = types.MethodType(type(module).forward, module)
    return bool(vars(module).get("forward", own) != own)


def _is_block(module: nn.Module) -> bool:
    forward = inspect.getattr_static(type(module), "forward")
    is_method = isinstance(forward, types.FunctionType) and forward is not nn.Module.forward
    if not is_method or replaces_forward(module):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def floats_in(child: nn.Module) -> tuple[float, ...]:
    """The numbers that a child and the modules inside hold, such as a rate of dropout.

    Integers are left out: often they count the layers, and nothing reads them.
    """
    return tuple(value for module in child.modules() for value in vars(module).values() if type(value) is float)


def has_inner_hooks(child: nn.Module) -> bool:
    """Whether a module inside has hooks; its own are run by those that call it."""
    inner = itertools.islice(child.modules(), 1, None)
    return any(getattr(module, name) for module in inner for name in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
