"""`enable_disk_cache`, and what the cache did in this process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kp_dynamo.compat import fast_extremes, pjrt_plugins
from kp_dynamo.disk_cache import capture_counts, library, trial
from kp_dynamo.disk_cache.folder import private_folder
from kp_dynamo.exceptions import TPUCacheError, TPUConfigurationError

logger = logging.getLogger(__name__)

DEFAULT_MAX_GB = 10.0
_MOST_GB = 1e10  # no disk is larger, and its bytes fit into 64 bits
# Child processes inherit them, and so use the cache too.
FOLDER, MAX_BYTES, PLUGIN = "KP_TPU_CACHE_DIR", "KP_TPU_CACHE_MAX_BYTES", "KP_TPU_CACHE_PLUGIN"


@dataclass(frozen=True)
class DiskCache:
    """The disk cache of this process. The variables only tell it to child processes: user code may change them.

    Attributes:
        library: The library in front of the device's plugin.
        plugin: The path of that plugin.
        folder: Where programs and captures are.
        max_bytes: The folder's bound.
    """

    library: str
    plugin: str
    folder: Path
    max_bytes: int


# What this process put in front of its device's plugin, and why it put nothing there.
_in_front: DiskCache | None = None
_problem = ""


def enable_disk_cache(folder: str | os.PathLike[str], max_gb: float = DEFAULT_MAX_GB) -> None:
    """Keep the programs that XLA compiles, and captures, in `folder`, and load them from there in later processes.

    Call it before the XLA device is used. It holds for every program of the process, also for those of torch_xla's
    lazy tensors. Whatever goes wrong later (a full disk, a damaged entry) costs a compilation and is counted:
    `cache_stats()["disk"]`.

    The first use of a folder on a TPU tries the cache there: two processes compile, save and load a small model. If
    that fails, a warning gives the reason, and the cache stays off.

    Args:
        folder: Created with mode 0700. A folder that others can write to is refused.
        max_gb: The folder's bound. The programs and captures that were used least recently go first.

    Raises:
        TPUCacheError: The device has started, its compiler is no plugin (XLA:CPU in torch_xla), the folder cannot be
            used, or the library was not built.
        TPUConfigurationError: `max_gb` is not a positive number.
    """
    if isinstance(max_gb, bool) or not isinstance(max_gb, int | float) or not 0 < max_gb < float("inf"):
        raise TPUConfigurationError(f"max_gb={max_gb!r} is invalid. Allowed: a positive number. Try: max_gb=10.")
    if fast_extremes.is_client_started():
        raise TPUCacheError(
            "enable_disk_cache() came too late: the XLA device of this process has started. Try: call it right after "
            f"`import kp_dynamo`, or set {FOLDER} in the environment of the process."
        )
    pjrt_plugins.require_plugin()
    global _problem
    path = library.library_path()
    chosen = private_folder(folder)
    plugin = pjrt_plugins.plugin_behind(path, os.environ.get(PLUGIN))
    _problem = trial.problem_at_first_use(chosen, plugin) if pjrt_plugins.is_tpu() else ""
    if _problem:
        logger.warning("the disk cache is off, because it does not work on this machine: %s", _problem)
        return
    cache = DiskCache(path, plugin, chosen, _whole(min(max_gb, _MOST_GB) * 1e9))
    library.configure(path, plugin, str(cache.folder), cache.max_bytes)
    pjrt_plugins.put_in_front(path, plugin)
    os.environ.update({FOLDER: str(chosen), MAX_BYTES: str(cache.max_bytes), PLUGIN: plugin})
    _use(cache)


def _use(cache: DiskCache) -> None:
    global _in_front
    _in_front = cache
    atexit.unregister(_log_stats)  # of an earlier call
    atexit.register(_log_stats)


def _whole(num_bytes: float) -> int:
    return max(1, int(min(num_bytes, _MOST_GB * 1e9)))


def in_front() -> DiskCache | None:
    """The disk cache that this process put in front of its device's plugin."""
    return _in_front


def enable_from_environment() -> None:
    """Enable the cache if KP_TPU_CACHE_DIR names a folder. A problem is a warning: the program runs without it."""
    folder, plugin = os.environ.get(FOLDER), os.environ.get(PLUGIN)
    try:
        if not plugin:
            _leave_front()
        if not folder:
            return
        pjrt_plugins.require_plugin()
        bound = _bound_from_environment()
        if plugin and pjrt_plugins.is_in_front(path := library.library_path()):
            # A parent process has enabled it, so it also works for a device that has started.
            cache = DiskCache(path, plugin, private_folder(folder), _whole(bound))
            library.configure(path, plugin, str(cache.folder), cache.max_bytes)
            _use(cache)
            return
        enable_disk_cache(folder, bound / 1e9)
    except Exception as problem:  # noqa: BLE001 - an import must not fail because of a variable
        logger.warning("%s=%s has no effect: %s", FOLDER, folder or "", problem)


def _bound_from_environment() -> float:
    """KP_TPU_CACHE_MAX_BYTES, or the default.

    Raises:
        TPUConfigurationError: It is not a positive number.
    """
    given = os.environ.get(MAX_BYTES)
    try:
        bound = float(given) if given else DEFAULT_MAX_GB * 1e9
    except ValueError:
        bound = 0.0
    if not 0 < bound < float("inf"):
        raise TPUConfigurationError(
            f"{MAX_BYTES}={given} is invalid. Allowed: a positive number of bytes. Try: {MAX_BYTES}=10000000000."
        )
    return bound


def _leave_front() -> None:
    """Let libtpu take its place again, in a process that inherits our library in front of it and not libtpu's path."""
    with contextlib.suppress(TPUCacheError):  # it was not built
        pjrt_plugins.leave_front(library.library_path())


def disk_stats() -> dict[str, Any]:
    """What the disk cache did in this process. `captures` has what it did with whole captures.

    `state` is "on", or the reason why there is no cache. `misses` counts by reason: "absent" (not in the folder),
    "damaged" (deleted), "unreadable", "not_loaded" (the compiler refused what it had written), "no_key" and
    "dumped" (XLA's flags ask for dumps, which a loaded program would not give).
    """
    if _in_front is None:
        return {"state": f"it does not work on this machine: {_problem}" if _problem else "not enabled"}
    counts = library.counters(_in_front.library)
    return {
        "state": library.state(_in_front.library),
        "folder": str(_in_front.folder),
        "hits": counts["hits"],
        "misses": {reason: counts[reason] for reason in library.MISSES},
        "saved": counts["saved"],
        "unsaved": {reason: counts[reason] for reason in ("not_saved", "not_serialized", "too_large")},
        "evictions": counts["evicted"] + capture_counts.COUNTS.evicted,
        "loaded_bytes": counts["loaded_bytes"],
        "saved_bytes": counts["saved_bytes"],
        "compile_s": counts["compile_ns"] / 1e9,
        "load_s": counts["load_ns"] / 1e9,
        # The part of load_s in which files were read and their checksums verified; the rest is the compiler's.
        "read_s": counts["read_ns"] / 1e9,
        # What the loaded programs took to compile, in the processes that saved them.
        "avoided_compile_s": counts["avoided_ns"] / 1e9,
        "captures": capture_counts.stats(),
    }


def _log_stats() -> None:
    stats = disk_stats()
    missed = ", ".join(f"{reason} {number}" for reason, number in stats.get("misses", {}).items() if number)
    captures = capture_counts.stats()
    logger.info(
        "disk cache: %s; %d programs loaded, %.2f MB in %.2f s instead of %.2f s; compiled: %s; saved: %d; "
        "%d captures loaded in %.2f s instead of %.2f s, stored: %d",
        stats["state"],
        *(stats["hits"], stats["loaded_bytes"] / 1e6, stats["load_s"], stats["avoided_compile_s"]),
        *(missed or "none", stats["saved"]),
        *(captures["loaded"], captures["load_s"], captures["avoided_s"], captures["stored"]),
        extra={"event": "disk cache", **stats},
    )
