"""The soft time budget of a compilation, `compile_timeout_s`: estimate, warning, and error after the compilation.

XLA cannot be interrupted within a process, so nothing here stops a compilation. Hard limits kill a process:
`aot_compile(timeout_s=...)` and `--timeout` of the command line.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from kp_dynamo.exceptions import XLACompilationTimeoutError
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.user_frames import stack_text

logger = logging.getLogger(__name__)

_active = threading.local()


@contextlib.contextmanager
def time_budget(seconds: float | None, what: str) -> Iterator[None]:
    """Give the block a budget of `seconds`; nested blocks count towards the outer one.

    When the budget is exceeded, a warning reports where the block is. When the block ends, it raises.

    Args:
        seconds: The budget; None for no budget.
        what: What is compiled, for messages.

    Raises:
        XLACompilationTimeoutError: The block ended after its budget.
    """
    if seconds is None or getattr(_active, "is_on", False):
        yield
        return
    start = time.monotonic()
    watch = threading.Timer(seconds, _warn, (threading.get_ident(), what, seconds))
    watch.daemon = True
    _active.is_on = True
    watch.start()
    try:
        yield
    finally:
        _active.is_on = False
        watch.cancel()
    taken = time.monotonic() - start
    if taken > seconds:
        raise XLACompilationTimeoutError(
            f"compiling {what} took {taken:.1f} s, longer than compile_timeout_s={seconds:g} allows. XLA could not be "
            "interrupted, so it finished, and its programs are cached for the same call. Try: raise the budget, set "
            "it to None, or compile less at once (fewer layers, torch.compiler.disable)."
        )


def estimate_compile_s(num_operators: int, what: str, seconds: float | None) -> float | None:
    """Estimate the compile time of a graph from this process's earlier compilations; None before the first one.

    Warns if the estimate exceeds the budget, while the compilation can still be cancelled.
    """
    done = TELEMETRY.counts["operators_compiled"]
    if not done:
        return None
    expected = num_operators * (TELEMETRY.seconds["trace"] + TELEMETRY.seconds["xla"]) / done
    if seconds is not None and expected > seconds:
        logger.warning(
            "compiling %s, %d operators, is expected to take %.1f s by what this process has compiled so far; "
            "compile_timeout_s is %g",
            what,
            num_operators,
            expected,
            seconds,
        )
    return expected


def _warn(thread: int, what: str, seconds: float) -> None:
    logger.warning(
        "compiling %s takes longer than compile_timeout_s=%g; it cannot be interrupted, and raises when it ends. It is "
        "at (frames of torch left out):\n%s",
        what,
        seconds,
        stack_text(thread),
    )
