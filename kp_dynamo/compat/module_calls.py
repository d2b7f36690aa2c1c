"""A call of a module as a function that Dynamo captures."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import nn
from torch._dynamo import trace_rules

_numbers = count()


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What `module.compile()` compiles: a call of the module with its hooks, whatever was compiled before.

    torch 2.9 compiles `module._call_impl`: Dynamo skips it, and captures the forward that it calls. But Dynamo skips a
    forward of torch's own too, such as that of nn.Sequential, and then captures nothing. Such a module gets a function
    around its call. The function has code of its own, because Dynamo counts recompilations by code.
    """
    forward = module.forward
    if not isinstance(forward, types.MethodType) or not trace_rules.check(forward):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=f"model_{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, closure=call.__closure__)
