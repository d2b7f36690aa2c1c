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
    """`misses` and `refused` count by reason."""

    loaded: int = 0
    stored: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0
    avoided_s: float = 0.0


COUNTS = Counts()
_lock = threading.Lock()


def count_stored() -> None:
    """Count a capture that was written."""
    with _lock:
        COUNTS.stored += 1


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


def refuse(reason: str) -> None:
    """Count a capture that is not stored."""
    logger.debug("capture not stored: %s", reason)
    with _lock:
        COUNTS.refused[reason] += 1


def stats() -> dict[str, Any]:
    """The counters, for `cache_stats()["disk"]["captures"]`."""
    with _lock:
        return {
            "loaded": COUNTS.loaded,
            "stored": COUNTS.stored,
            "misses": dict(COUNTS.misses),
            "not_stored": dict(COUNTS.refused),
            "load_s": COUNTS.load_s,
            "avoided_s": COUNTS.avoided_s,
        }
