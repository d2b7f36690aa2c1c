"""Report a graph or a length that is not padded: it gets exact lengths instead, or an error with `strict=True`.

The reason of a single operator is a `Refused`, which its rule in `passes/padding/` raises.
"""

from __future__ import annotations

import logging

from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.warn_once import warn_once

logger = logging.getLogger(__name__)

REMEDY = "Try: rewrite that line, mask by hand and pass a fixed size, or remove the option buckets"


def refuse_graph(reason: str) -> None:
    """Warn that each length of a graph is compiled without padding."""
    TELEMETRY.count("bucket_refusals")
    warn(f"a graph is compiled for each length, not padded to buckets: {reason}. {REMEDY}")


def refuse_length(reason: str, *, strict: bool) -> None:
    """Warn that one combination of lengths is compiled without padding.

    Raises:
        TPUOptimizationError: `strict` is set.
    """
    if strict:
        raise TPUOptimizationError(f"strict=True and {reason}.")
    TELEMETRY.count("exact_lengths")
    warn(f"a length is compiled without padding: {reason}.")


def warn(text: str) -> None:
    """Log a warning of this room once per process."""
    warn_once(logger, "%s", text)
