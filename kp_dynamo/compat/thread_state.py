"""Make process-wide state of torch 2.9 thread-local where it describes one thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._dynamo.backends import registry
from torch.fx import _symbolic_trace


class _Here(threading.local):
    traces = 0


_here = _Here()


@functools.cache
def install() -> None:
    """Let threads compile concurrently. `import kp_dynamo.backend` calls this once.

    * While one thread traces (AOTAutograd does, at every first call), torch mistakes a call of a compiled function in
      any other thread for one inside the trace, and raises "Detected that you are using FX to symbolically trace a
      dynamo-optimized function". The patch counts traces per thread, and torch's check only sees its own thread's.
    * Two threads that name a backend for the first time both register it, and the second fails with "duplicate name".
      The patch accepts the second registration.
    """
    _symbolic_trace.Tracer.trace = _noted(_symbolic_trace.Tracer.trace)  # type: ignore[method-assign]
    for name in ("is_fx_tracing", "is_fx_symbolic_tracing"):
        if hasattr(_symbolic_trace, name):  # the second is new in torch 2.9
            _only_here(getattr(_symbolic_trace, name))
    registry.register_backend = _once_each(registry.register_backend)


def _noted(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _here.traces += 1
        try:
            return trace(*args, **kwargs)
        finally:
            _here.traces -= 1

    return noted


def _only_here(asked: Any) -> None:
    """Make `asked` return False while only other threads trace.

    This changes it in place, because compiled functions hold it and Dynamo compares its identity.
    """
    original = FunctionType(asked.__code__, asked.__globals__)
    asked.__kwdefaults__ = {"original": original, "here": _here}
    asked.__code__ = _asked_here.__code__


def _asked_here(*, original: Callable[[], bool], here: _Here) -> bool:
    # Every call of a compiled function asks this.
    return here.traces > 0 and original()


def _once_each(register: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.Lock()

    @functools.wraps(register)
    def registered(compiler_fn: Any = None, name: str | None = None, tags: Any = ()) -> Any:
        with lock:
            if compiler_fn is not None and registry._COMPILER_FNS.get(name or "") is compiler_fn:
                return compiler_fn
            return register(compiler_fn, name, tags)

    return registered
