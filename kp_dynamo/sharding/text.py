"""Words of error messages about many parameters."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 4


def listed(parts: Sequence[str]) -> str:
    """The first few of these, and how many more there are."""
    more = f"; and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
    return "; ".join(parts[:_MOST]) + more
