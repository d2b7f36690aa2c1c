"""One lock for tracing, and for calls that reach every live tensor of the device."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Tracing changes process-wide state of torch_xla (scalars, precision, seed): one graph at a time.
LOCK = threading.RLock()
# torch_xla 2.9: these run, and the last one discards, the pending work of every live tensor of the device.
_REACH_ALL_TENSORS = ("_xla_step_marker", "_xla_sync_live_tensors", "_clear_pending_irs")


@contextlib.contextmanager
def one_trace_at_a_time() -> Iterator[None]:
    """Hold the lock. Must be a tracing function's outermost decorator: its placeholders die before the lock is free."""
    with LOCK:
        yield


@functools.cache
def install() -> None:
    """Make `torch_xla.sync()` of other threads wait until no placeholder is alive. Import torch_xla first.

    A placeholder has no buffer, so torch_xla aborts the process if it runs work that depends on one.
    """
    import torch_xla

    for name in _REACH_ALL_TENSORS:
        setattr(torch_xla._XLAC, name, _locked(getattr(torch_xla._XLAC, name)))


def _locked(entry: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(entry)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return entry(*args, **kwargs)

    return locked
