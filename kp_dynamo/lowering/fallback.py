"""Find the operators that torch_xla would run on the CPU, without running anything.

If a torch_xla kernel has no lowering for its operator or its arguments, it passes its tensors to `aten::_to_cpu` or
`aten::_local_scalar_dense`. A placeholder has no buffer, so that would abort the process. Both operators therefore have
kernels here that raise while a graph is traced (torch_xla 2.9).

They are registered for a dispatch key that only tracing threads include. All other threads must call torch_xla's own
kernels. A Python kernel would hold the GIL while it reads a tensor, which deadlocks with a compiling thread: one has
the GIL and waits for the device lock, the other has the lock and waits for the GIL. And a failing read would abort the
process: torch_xla 2.9 returns early from `ReleaseGilAndTransferData`, without the GIL that it released.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

# torch has no thread-local mode key for out-of-tree backends. This key has no kernels.
_KEY = "TESTING_ONLY_GenericMode"


class NeedsValue(Exception):
    """An operator read the value of a tensor while it was traced."""


@contextlib.contextmanager
def values_forbidden() -> Iterator[None]:
    """Make an operator of this thread that needs a tensor's value on the CPU raise `NeedsValue`."""
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
            return given  # torch unwraps a number that it wrapped in a tensor before it calls Python
        tensors = [given] if isinstance(given, torch.Tensor) else given
        if any(tensor.device.type == "xla" for tensor in tensors):
            raise NeedsValue(op.name())
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(given)

    return guarded
