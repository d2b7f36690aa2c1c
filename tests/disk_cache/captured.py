"""Captures in a folder, without a device that keeps programs: each compilation starts as in a new process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kp_dynamo
from kp_dynamo.disk_cache import capture_counts, captures
from kp_dynamo.session import session

KEPT = 100_000_000


class Captures:
    """A folder of captures that the session of the backend uses."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, max_bytes: int = KEPT) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        patch.setattr(captures, "max_bytes", lambda: max_bytes)
        patch.setattr(captures, "folder", lambda: folder)
        patch.setattr(session, "disk_folder", lambda: folder)

    def entries(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def new_process(self) -> None:
        """Forget what this process has compiled."""
        kp_dynamo.clear_cache()
        torch._dynamo.reset()

    def twice(self, call: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
        """The results of a call in two processes, and what the cache did in each."""
        self.new_process()
        with counted() as first:
            one = call()
        self.new_process()
        with counted() as second:
            two = call()
        return one, two, first, second


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """The counters of captures within the context that are not 0, once it has ended."""
    before, found = capture_counts.stats(), {}
    yield found
    for name, after in capture_counts.stats().items():
        if name.endswith("_s"):
            continue
        if isinstance(after, dict):
            after = {key: count - before[name].get(key, 0) for key, count in after.items()}
            after = {key: count for key, count in after.items() if count}
        else:
            after -= before[name]
        if after:
            found[name] = after
