"""The stages of a compilation as ranges: in torch's structured trace, which tlparse shows, and in the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch._logging._internal import trace_log

_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Show the block as the range "kp_tpu: <name>"; free unless TORCH_TRACE is set or a profiler is on.

    In the trace it is a Chrome event inside those of Dynamo. In the profiler it is entered without the dispatcher,
    because a compilation runs under torch's fake modes.
    """
    name = f"kp_tpu: {name}"
    with contextlib.ExitStack() as ranges:
        if trace_log.handlers:
            ranges.enter_context(torch._dynamo.utils.chromium_event_timed(name))
        if _is_profiled():
            ranges.enter_context(torch._C._profiler._RecordFunctionFast(name))
        yield
