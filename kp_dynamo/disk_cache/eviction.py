"""The folder's bound, after Python wrote to it: as `native/eviction.c`, which also deletes half-written files."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kp_dynamo.disk_cache import entries


def evict(folder: Path, max_bytes: int, written: str) -> int:
    """Delete the entries that were used least recently, until the folder is within its bound; returns their number.

    Args:
        folder: The folder.
        max_bytes: Its bound, which also counts half-written files.
        written: The name of the entry that was just written, which stays.

    Raises:
        OSError: The folder cannot be read.
    """
    found = list(_files(folder))
    total = sum(about.st_size for _, about in found)
    if total <= max_bytes:
        return 0
    named = [(path, about) for path, about in found if entries.NAME.fullmatch(path.name)]
    ours = [(path, about) for path, about in named if _is_ours(path)]
    total -= sum(about.st_size for _, about in named) - sum(about.st_size for _, about in ours)
    deleted = 0
    for _, size, path in sorted((_used_ns(path, about), about.st_size, path) for path, about in ours):
        if total <= max_bytes:
            break
        if path.name == written:
            continue
        try:
            path.unlink()
            deleted += 1
        except FileNotFoundError:  # another process has deleted it
            pass
        except OSError:
            continue
        total -= size
    return deleted


def _is_ours(path: Path) -> bool:
    """Whether a file is the cache's. Folders of blobs have files with the name of an entry too."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return entries.is_ours(file.read(entries.MAGIC_SIZE))
    return False


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files with the name of an entry, and half-written ones."""
    for path in folder.iterdir():
        if not (entries.NAME.fullmatch(path.name) or path.name.startswith(entries.TEMPORARY)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            if stat.S_ISREG((about := path.lstat()).st_mode):
                yield path, about


def _used_ns(path: Path, about: os.stat_result) -> int:
    """When an entry was used last. A time in the future, after the clock was set back, is now from here on."""
    now = time.time_ns()
    if about.st_mtime_ns <= now:
        return about.st_mtime_ns
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)
    return now
