"""What the disk cache did during a run of `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kp_dynamo.explanation.text_layout import counted


@dataclass(frozen=True)
class DiskReport:
    """The counters of `cache_stats()["disk"]` for programs, in this run.

    Attributes:
        state: "on", or why the cache does nothing.
        hits: Programs that were loaded.
        misses: Programs that were compiled, by reason, and `unsaved` those of them that were not written.
        compile_s: Seconds of compiling; `load_s` of loading.
        avoided_compile_s: What the loaded programs took to compile when they were saved.
    """

    state: str
    folder: str
    hits: int = 0
    misses: dict[str, int] | None = None
    saved: int = 0
    unsaved: dict[str, int] | None = None
    evictions: int = 0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    compile_s: float = 0.0
    load_s: float = 0.0
    read_s: float = 0.0
    avoided_compile_s: float = 0.0


def disk_report(before: dict[str, Any], after: dict[str, Any]) -> DiskReport | None:
    """The difference between two `disk_stats()`; None if the cache is not enabled.

    Without captures: a run of `explain` loads none, because it shows what AOTAutograd and the passes do.
    """
    if "folder" not in after:
        return None
    shown = {name: value for name, value in after.items() if name != "captures"}
    return DiskReport(**{name: _difference(before.get(name), value) for name, value in shown.items()})


def disk_lines(found: DiskReport | None) -> Iterator[str]:
    """One line for the text, and one for programs that were not written; no line without a cache."""
    if found is None:
        return
    if found.state != "on":
        yield f"disk cache: off, {found.state}"
        return
    misses, unsaved = _reasons(found.misses), _reasons(found.unsaved)
    loaded = f", {found.loaded_bytes / 1e6:.2f} MB in {found.load_s:.2f} s instead of {found.avoided_compile_s:.2f} s"
    yield (
        f"disk cache: {counted(found.hits, 'hit')}{loaded if found.hits else ''}; "
        f"{counted(sum((found.misses or {}).values()), 'miss', 'misses')}{f' ({misses})' if misses else ''}"
    )
    if unsaved:
        yield f"  compiled and not written: {unsaved}"


def _reasons(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in (counts or {}).items() if number)


def _difference(before: Any, after: Any) -> Any:
    if isinstance(after, dict):
        return {name: _difference((before or {}).get(name), value) for name, value in after.items()}
    return after if isinstance(after, str) else after - (before or 0)
