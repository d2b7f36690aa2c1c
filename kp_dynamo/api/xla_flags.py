"""Tries TPU compiler flags on a model: libtpu must accept them, and its estimate must improve."""

from __future__ import annotations

import os
from collections.abc import Callable

from kp_dynamo.aot.report import AotReport
from kp_dynamo.exceptions import TPUNotAvailableError

CANDIDATES = ("--xla_tpu_scoped_vmem_limit_kib=32768", "--xla_tpu_scoped_vmem_limit_kib=65536")
"""Limits of the vector memory of a fusion, which affect single-chip programs. Neither helps one GPT block on a v5e
(inference, width 768, 4 x 512 tokens, `aot --target v5e`): modelled 0.324 ms without, 0.331 and 0.433 with."""

_LEAST_GAIN = 0.02
"""A smaller relative gain is within the error of the compiler's estimates."""


def best_flags(compile_once: Callable[[], AotReport], candidates: tuple[str, ...] = CANDIDATES) -> list[str]:
    """The candidate with the shortest modelled time, if it beats compiling without flags.

    A candidate that libtpu does not know, or that makes it fail, is skipped. Not thread-safe: the compiler reads the
    environment.

    Raises:
        TPUBackendError: The model does not compile without any flag.
    """
    without = compile_once().modelled_ms
    times = {flag: _modelled_ms(flag, compile_once) for flag in candidates}
    flag = min(times, key=times.__getitem__)
    return [flag] if times[flag] < (1 - _LEAST_GAIN) * without else []


def _modelled_ms(flag: str, compile_once: Callable[[], AotReport]) -> float:
    before = os.environ.get("LIBTPU_INIT_ARGS")
    os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flag}".strip()
    try:
        return compile_once().modelled_ms
    except TPUNotAvailableError:  # libtpu aborts its process on an unknown flag
        return float("inf")
    finally:
        if before is None:
            del os.environ["LIBTPU_INIT_ARGS"]
        else:
            os.environ["LIBTPU_INIT_ARGS"] = before
