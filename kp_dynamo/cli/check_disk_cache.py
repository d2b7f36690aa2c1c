"""`doctor --cache`: whether programs that one process saved run in another one, on this machine's device."""

from __future__ import annotations

from kp_dynamo.cli.checks import Check
from kp_dynamo.compat.pjrt_plugins import require_plugin
from kp_dynamo.disk_cache.trial import try_in_two_processes
from kp_dynamo.exceptions import TPUCacheError

_NAME = "disk cache"


def check_disk_cache(timeout_s: float) -> Check:
    """Try the cache in two processes, each within `timeout_s`."""
    try:
        require_plugin()
    except TPUCacheError as reason:
        return Check(_NAME, "ok", str(reason))
    found = try_in_two_processes(timeout_s)
    return Check(_NAME, "ok" if found.is_right else "failed", found.message)
