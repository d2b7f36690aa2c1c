"""Notice the frames that Dynamo of torch 2.9 gives up: it runs them eagerly, and says so at most at log level INFO.

A backend with an attribute `on_given_up` is called with each such frame that it was asked to compile. There are four
kinds, and nothing of torch is patched to see the first three:

* the trace raises `Unsupported`: a callback at the end of a compilation finds the exception;
* the trace is skipped, for example at a graph break in a loop: Dynamo's metrics say so, when the next frame comes or
  `collect` is called;
* the frame reached the recompile limit: Dynamo logs that as a warning, which a filter of its logger reads;
* `give_up` is called during the trace.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch._dynamo import convert_frame, exc
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import (
    counters,
    get_compilation_metrics,
    register_hook_for_recompile_user_context,
)
from torch._guards import CompileContext

from kp_dynamo.compat.dynamo_trace import without_wrappers


@dataclass(frozen=True)
class GivenUp:
    """A frame that runs eagerly.

    Attributes:
        frame: The function and its place, "forward (model.py:12)".
        reason: Why, in Dynamo's words.
        line: The line of the user at which Dynamo gave up, "file:line"; "" if unknown.
        is_limit: Whether it was compiled `limit` times, and `reason` is why the last program does not fit.
        limit: The recompile limit.
        options: The options that `torch.compile` got; None if it got none.
    """

    frame: str
    reason: str
    line: str = ""
    is_limit: bool = False
    limit: int = 0
    options: Any = None


@dataclass(frozen=True)
class _Started:
    """A compilation that has begun: its code, what takes its report, and what Dynamo had noted before it."""

    code: CodeType
    report: Callable[[GivenUp], None]
    options: Any
    complaints: Counter[str]
    time_us: int


_started: dict[str, _Started] = {}

# Its wrapper of `step` breaks the graph on purpose; Dynamo then compiles the step inside.
_OPTIMIZER = inspect.getfile(torch.optim.Optimizer)


@functools.cache
def install() -> None:
    """Watch Dynamo's compilations; `kp_dynamo.backend` calls this when the backend is looked up."""
    # The name is that of a hook for recompilations, but torch 2.9 calls it before every one, also after a reset.
    register_hook_for_recompile_user_context(_on_start)
    logging.getLogger(convert_frame.__name__).addFilter(_on_log)


def collect() -> None:
    """Report what Dynamo skipped in compilations that have ended."""
    ended = {metrics.compile_id: metrics for metrics in get_compilation_metrics()}
    for number, begun in list(_started.items()):
        metrics = ended.get(number)
        # After a reset, Dynamo gives the same numbers again.
        if metrics is None or (metrics.end_time_us or 0) < begun.time_us:
            continue
        del _started[number]
        new = Counter(counters["unimplemented"]) - begun.complaints
        # A complaint that became a graph break is no longer counted, and a skipped frame calls no backend.
        if new and metrics.fail_type is None and metrics.aot_autograd_cumulative_compile_time_us is None:
            begun.report(GivenUp(_frame_name(begun.code), list(new)[-1], options=begun.options))


def give_up(reason: str) -> NoReturn:
    """Report the frame that Dynamo traces, and let it run eagerly."""
    begun = _started.pop(str(CompileContext.current_compile_id()), None)
    if begun is not None:
        begun.report(GivenUp(_frame_name(begun.code), reason, options=begun.options))
    raise exc.SkipFrame(reason)


def _on_start() -> str:
    collect()
    # `torch._dynamo.reset()` forgets callbacks.
    if _on_end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_on_end)
    context = _compilation()
    if context is None or context["code"].co_filename == _OPTIMIZER:
        return ""
    if (report := _report_of(context["compiler_fn"])) is not None and not context["one_graph"]:
        options = _options_of(context["compiler_fn"])
        number = str(CompileContext.current_compile_id())
        complaints = Counter(counters["unimplemented"])
        now = time.time_ns() // 1000
        _started[number] = _Started(context["code"], report, options, complaints, now)
    return ""


def _on_end(args: CallbackArgs) -> None:
    error = sys.exception()
    if args.callback_trigger is not CallbackTrigger.DYNAMO or not isinstance(error, exc.Unsupported):
        return
    begun = _started.pop(args.compile_id, None)
    if begun is None:
        return
    place = error.real_stack[-1] if error.real_stack else None
    line = f"{place.filename}:{place.lineno}" if place is not None else ""
    try:
        begun.report(GivenUp(_frame_name(begun.code), str(error.msg), line, options=begun.options))
    except exc.TorchDynamoException:
        # torch 2.9 does not count down behind a callback that raises.
        callback_handler._CompilationCallbackHandler__pending_callbacks_counter -= 1  # type: ignore[attr-defined]
        raise


def _on_log(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith("torch._dynamo hit config.") or (context := _compilation()) is None:
        return True
    report = _report_of(context["compiler_fn"])
    if report is not None and isinstance(record.args, tuple):
        _started.pop(str(CompileContext.current_compile_id()), None)
        options, (_, limit, _, reason, *_) = _options_of(context["compiler_fn"]), record.args
        name = _frame_name(context["code"])
        report(GivenUp(name, str(reason), is_limit=True, limit=int(str(limit)), options=options))
    return report is None


def _compilation() -> dict[str, Any] | None:
    """The variables of Dynamo's compilation of a frame, whose backend nothing else tells."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not convert_frame._compile.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def _report_of(backend: Any) -> Callable[[GivenUp], None] | None:
    return getattr(without_wrappers(backend), "on_given_up", None)


def _options_of(backend: Any) -> Any:
    """The options that `torch.compile` keeps for a backend."""
    return (getattr(backend, "kwargs", None) or {}).get("options")


def _frame_name(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
