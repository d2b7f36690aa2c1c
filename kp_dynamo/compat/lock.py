"""One lock for whatever traces, and for whatever reaches every live tensor of the device."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Tracing moves process-wide state of torch_xla (scalars, precision, seed): one graph at a time.
LOCK = threading.RLock()
# torch_xla 2.9: `sync()` runs, and the last one forgets, what is pending of every live tensor of the device.
_REACH_ALL_TENSORS = ("_xla_step_marker", "_xla_sync_live_tensors", "_clear_pending_irs")


@contextlib.contextmanager
def one_trace_at_a_time() -> Iterator[None]:
    """Hold the lock. As the outermost decorator of a function that traces: its placeholders are gone when it ends."""
    with LOCK:
        yield


@functools.cache
def install() -> None:
    """Let `torch_xla.sync()` of another thread wait until no placeholder is alive; torch_xla must have been imported.

    A placeholder has no buffer, and torch_xla ends the process where it is to run what is made of one.
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
