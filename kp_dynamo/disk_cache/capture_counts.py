"""What was done with captures in this process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class Counts:
    """`misses` and `not_stored` count by reason; `evicted` are files, also of programs."""

    loaded: int = 0
    stored: int = 0
    evicted: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    not_stored: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0
    avoided_s: float = 0.0


COUNTS = Counts()
_lock = threading.Lock()


def count_stored(num_evicted: int) -> None:
    """Count a capture that was written, and the files that were deleted to keep the folder's bound."""
    with _lock:
        COUNTS.stored += 1
        COUNTS.evicted += num_evicted


def count_loaded(seconds: float, avoided_s: float) -> None:
    """Count a capture that is ready to be called, `seconds` after the look-up began."""
    with _lock:
        COUNTS.loaded += 1
        COUNTS.load_s += seconds
        COUNTS.avoided_s += avoided_s


def count_miss(reason: str) -> None:
    """Count a capture that was compiled although it might have been loaded."""
    with _lock:
        COUNTS.misses[reason] += 1


def count_not_stored(reason: str) -> None:
    """Count a capture that is not stored."""
    logger.debug("capture not stored: %s", reason)
    with _lock:
        COUNTS.not_stored[reason] += 1


def stats() -> dict[str, Any]:
    """The counters, for `cache_stats()["disk"]["captures"]`."""
    with _lock:
        return {
            "loaded": COUNTS.loaded,
            "stored": COUNTS.stored,
            "misses": dict(COUNTS.misses),
            "not_stored": dict(COUNTS.not_stored),
            "load_s": COUNTS.load_s,
            "avoided_s": COUNTS.avoided_s,
        }
