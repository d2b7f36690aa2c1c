"""`python -m kp_dynamo cache list | stats | verify | clear FOLDER`: the folder of `enable_disk_cache`."""

from __future__ import annotations

import math
import time
from pathlib import Path

from kp_dynamo.disk_cache.contents import Stored, delete, forgotten_in, stored_in


def list_programs(folder: str) -> str:
    """A line for each program and capture, the most recently used first, and one for all."""
    found = stored_in(folder)
    lines = [
        f"{stored.path.name[:16]}  {stored.num_bytes / 1e6:9.3f} MB  {_seconds(stored):>10}  "
        f"used {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(stored.used_at))}"
        f"{'  capture' if stored.is_capture else ''}"
        for stored in found
    ]
    return "\n".join([*lines, _total(found)])


_DAY_S = 86400.0
_AGES = {"today": 1, "in the last 7 days": 7, "in the last 30 days": 30, "before that": math.inf}


def stats(folder: str) -> str:
    """What the folder holds by the time of the last use: what `max_gb` would delete first is at the end."""
    found, now, lines, above = stored_in(folder), time.time(), [], 0.0
    for name, days in _AGES.items():
        # A clock that was set back makes an age negative.
        part = [stored for stored in found if above <= max(0.0, now - stored.used_at) / _DAY_S < days]
        lines.append(f"used {name}: {_total(part)}")
        above = days
    if sizes := sorted(stored.num_bytes / 1e6 for stored in found if not stored.is_capture):
        lines.append(f"largest program: {sizes[-1]:.3f} MB, median {sizes[len(sizes) // 2]:.3f} MB")
    lines.append(f"damaged: {sum(_is_damaged(stored) for stored in found)}")
    return "\n".join([_total(found), *lines, *_unfinished(forgotten_in(folder))])


def verify(folder: str) -> tuple[str, bool]:
    """A line for each file that is not whole, and whether all are. A process deletes damaged ones it tries to load."""
    found = stored_in(folder)
    lines = [
        f"{stored.path} {'is damaged' if stored.is_readable else 'cannot be read'}"
        for stored in found
        if not stored.is_whole
    ]
    damaged = sum(_is_damaged(stored) for stored in found)
    return "\n".join([*lines, f"{_total(found)}, {damaged} damaged"]), not lines


def clear(folder: str) -> str:
    """Delete every program and capture, and what killed processes left half written. Other files stay."""
    found = [stored for stored in stored_in(folder) if stored.is_readable]
    forgotten = forgotten_in(folder)
    delete([*(stored.path for stored in found), *(path for path, _ in forgotten)])
    return "\n".join([f"deleted {_total(found)}", *_unfinished(forgotten)])


def _unfinished(forgotten: list[tuple[Path, int]]) -> list[str]:
    """A line for half-written files, if there are any."""
    size = sum(size for _, size in forgotten) / 1e6
    line = f"half written by processes that were killed: {_counted(len(forgotten), 'file')}, {size:.3f} MB"
    return [line] if forgotten else []


def _seconds(stored: Stored) -> str:
    if not stored.is_readable:
        return "unreadable"
    return f"{stored.seconds:.2f} s" if stored.is_whole else "damaged"


def _is_damaged(stored: Stored) -> bool:
    return stored.is_readable and not stored.is_whole


def _total(found: list[Stored]) -> str:
    seconds = sum(stored.seconds for stored in found)
    size = sum(stored.num_bytes for stored in found) / 1e6
    num_captures = sum(stored.is_capture for stored in found)
    programs = _counted(len(found) - num_captures, "program")
    number = f"{programs} and {_counted(num_captures, 'capture')}" if num_captures else programs
    return f"{number}, {size:.3f} MB, {seconds:.2f} s of compiling"


def _counted(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
