"""Find the operators that torch_xla would run on the CPU, without running anything.

A torch_xla kernel that lacks a lowering, for its operator or only for these arguments, hands
its tensors to `aten::_to_cpu` or `aten::_local_scalar_dense`. On a placeholder, which has no buffer, that ends
the process. Both therefore have kernels (torch_xla 2.9) that raise while a graph is traced.

They are registered for a dispatch key that only a thread which traces includes. torch_xla's own kernels must stay the
ones that every other thread calls: a Python kernel would hold the GIL while a tensor is read, which deadlocks with a
thread that compiles (one has the GIL and waits for the lock of the device, the other has the lock and waits for the
GIL), and a read that fails would end the process: torch_xla 2.9 leaves `ReleaseGilAndTransferData` by an early return,
without the GIL that it has released.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

# torch has no dispatch key for backends of other people that is a mode of a thread. This one has no kernels.
_KEY = "TESTING_ONLY_GenericMode"


class NeedsValue(Exception):
    """An operator asked for the value of a tensor that is being traced."""


@contextlib.contextmanager
def values_forbidden() -> Iterator[None]:
    """Within, in this thread, an operator that needs a tensor's value on the CPU raises `NeedsValue`."""
    _register_kernels()
    with torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse(_KEY)):
        yield


@functools.cache
def _register_kernels() -> list[torch.library.Library]:
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    library = torch.library.Library("aten", "IMPL")
    for op in (torch.ops.aten._to_cpu.default, torch.ops.aten._local_scalar_dense.default):
        library.impl(op, _guarded(op), _KEY)
    return [others, library]


def _guarded(op: torch._ops.OpOverload) -> Any:
    key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

    def guarded(given: Any) -> Any:
        if isinstance(given, (bool, int, float, complex)):
            return given  # torch hands a number that it has wrapped in a tensor to Python as the number
        tensors = [given] if isinstance(given, torch.Tensor) else given
        if any(tensor.device.type == "xla" for tensor in tensors):
            raise NeedsValue(op.name())
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(given)

    return guarded
