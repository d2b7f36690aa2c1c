"""Find the operators that torch_xla would run on the CPU, without running anything.

A torch_xla kernel that lacks a lowering, for its operator or only for these arguments, hands
its tensors to `aten::_to_cpu` or `aten::_local_scalar_dense`. On a placeholder, which has no buffer, that ends
the process. Both are therefore overridden (torch_xla 2.9) and raise while a graph is traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kp_dynamo import compat

_state = threading.local()


class NeedsValue(Exception):
    """An operator asked for the value of a tensor that is being traced."""


@contextlib.contextmanager
def values_forbidden() -> Iterator[None]:
    """Within, an operator that needs a tensor's value on the CPU raises `NeedsValue`."""
    _guard_kernels()
    _state.tracing = True
    try:
        yield
    finally:
        _state.tracing = False


@functools.cache
def _guard_kernels() -> torch.library.Library:
    compat.device()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of any override, and this one is meant; outside a trace it only passes on.
        warnings.simplefilter("ignore", UserWarning)
        for name in ("_to_cpu", "_local_scalar_dense"):
            kernel = torch.library.get_kernel(f"aten::{name}", "XLA")
            library.impl(name, _guarded(name, kernel), "XLA", with_keyset=True, allow_override=True)
    return library


def _guarded(name: str, kernel: Any) -> Any:
    def guarded(keyset: Any, *args: Any) -> Any:
        if getattr(_state, "tracing", False):
            raise NeedsValue(name)
        return kernel.call_boxed(keyset, *args)

    return guarded
