"""`python -m kp_dynamo cache list | stats | verify | clear FOLDER`: the folder of `enable_disk_cache`."""

from __future__ import annotations

import math
import time

from kp_dynamo.disk_cache.contents import Program, delete, programs


def list_programs(folder: str) -> str:
    """A line for each program, the most recently used first, and one for all."""
    found = programs(folder)
    lines = [
        f"{program.path.name[:16]}  {program.num_bytes / 1e6:9.3f} MB  {_seconds(program):>10}  "
        f"used {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(program.used_at))}"
        for program in found
    ]
    return "\n".join([*lines, _total(found)])


_DAY_S = 86400.0
_AGES = {"today": 1, "in the last 7 days": 7, "in the last 30 days": 30, "before that": math.inf}


def stats(folder: str) -> str:
    """What the folder holds by the time of the last use: what `max_gb` would delete first is at the end."""
    found, now, lines, above = programs(folder), time.time(), [], 0.0
    for name, days in _AGES.items():
        # A clock that was set back makes an age negative.
        part = [program for program in found if above <= max(0.0, now - program.used_at) / _DAY_S < days]
        lines.append(f"used {name}: {_total(part)}")
        above = days
    if sizes := sorted(program.num_bytes / 1e6 for program in found):
        lines.append(f"largest program: {sizes[-1]:.3f} MB, median {sizes[len(sizes) // 2]:.3f} MB")
    lines.append(f"damaged: {sum(not program.is_whole for program in found)}")
    return "\n".join([_total(found), *lines])


def verify(folder: str) -> tuple[str, bool]:
    """A line for each damaged program, and whether all are whole. A process deletes those it tries to load."""
    found = programs(folder)
    damaged = [program for program in found if not program.is_whole]
    lines = [f"{program.path} is damaged" for program in damaged]
    return "\n".join([*lines, f"{_total(found)}, {len(damaged)} damaged"]), not damaged


def clear(folder: str) -> str:
    """Delete every program. Other files stay."""
    found = programs(folder)
    delete(found)
    return f"deleted {_total(found)}"


def _seconds(program: Program) -> str:
    return f"{program.compile_s:.2f} s" if program.is_whole else "damaged"


def _total(found: list[Program]) -> str:
    seconds = sum(program.compile_s for program in found)
    size = sum(program.num_bytes for program in found) / 1e6
    number = "1 program" if len(found) == 1 else f"{len(found)} programs"
    return f"{number}, {size:.3f} MB, {seconds:.2f} s of compiling"
