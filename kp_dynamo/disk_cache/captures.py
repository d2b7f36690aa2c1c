"""Compiled captures in the folder of the disk cache: a head of plain values in JSON, and the modules of the programs.

Nothing here raises for a bad folder or file: what fails is counted, and the capture is compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from pathlib import Path
from typing import Any

from kp_dynamo.disk_cache import enable, entries, eviction, library
from kp_dynamo.disk_cache.capture_counts import count_miss, count_not_stored, count_stored

logger = logging.getLogger(__name__)

_SCHEMA = 1
_MAX_BYTES = 1 << 30  # of a head, when it is no longer compressed


def folder() -> Path | None:
    """The folder, if the disk cache works in this process."""
    cache = enable.in_front()
    return cache.folder if cache is not None and library.state(cache.library) == "on" else None


def max_bytes() -> int:
    """The folder's bound."""
    cache = enable.in_front()
    return 0 if cache is None else cache.max_bytes


def load(key: str) -> tuple[dict[str, Any], list[bytes]] | None:
    """The head and the modules of the capture with this key; None if it cannot be had, which is counted."""
    place = folder()
    if place is None:
        return None
    digest = _digest(key)
    try:
        entry = entries.read(place, digest)
        if entry is None:
            count_miss("absent")
            return None
        head, modules = _parsed(entry.content)
        if head["schema"] != _SCHEMA or head["key"] != key:
            raise ValueError("it has another key")
    except OSError:
        count_miss("unreadable")
        return None
    except (ValueError, KeyError, TypeError, zlib.error):
        discard(key, "damaged")
        return None
    return {**head, "seconds": entry.seconds}, modules


def store(key: str, head: dict[str, Any], modules: list[bytes], seconds: float) -> None:
    """Write a capture, and delete what exceeds the folder's bound.

    Args:
        key: Its key.
        head: Plain values.
        modules: The modules of its programs, which are compressed.
        seconds: How long the work took that a process avoids by loading it.
    """
    place, bound = folder(), max_bytes()
    if place is None:
        return
    text = json.dumps({**head, "schema": _SCHEMA, "key": key, "sizes": [len(m) for m in modules]})
    packed = zlib.compress(text.encode(), 1)
    content = b"".join([len(packed).to_bytes(8, "little"), packed, *modules])
    if entries.HEADER.size + len(content) > bound:
        count_not_stored("too large")
        return
    digest = _digest(key)
    try:
        entries.write(place, digest, content, seconds)
    except OSError as problem:
        logger.debug("a capture was not written: %s", problem)
        count_not_stored("not written")
        return
    count_stored(_evicted(place, bound, digest.hex()))


def _evicted(place: Path, bound: int, written: str) -> int:
    try:
        return eviction.evict(place, bound, written)
    except OSError as problem:  # as in a folder that was removed meanwhile
        logger.debug("the folder was not kept within its bound: %s", problem)
        return 0


def discard(key: str, reason: str) -> None:
    """Delete a capture that cannot be used, and count the miss."""
    count_miss(reason)
    if (place := folder()) is not None:
        try:
            (place / _digest(key).hex()).unlink(missing_ok=True)
        except OSError as problem:  # as in a folder that can only be read by now
            logger.debug("a capture was not deleted: %s", problem)


def _digest(key: str) -> bytes:
    return hashlib.sha256(f"capture {_SCHEMA}\n{key}".encode()).digest()


def _parsed(content: bytes) -> tuple[dict[str, Any], list[bytes]]:
    start = 8 + int.from_bytes(content[:8], "little")
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(content[8:start], _MAX_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("its head is too large, or cut off")
    head, modules = json.loads(text), []
    for size in head["sizes"]:
        modules.append(content[start : start + size])
        start += size
    if start != len(content):
        raise ValueError("its modules have other sizes")
    return head, modules
