"""The Python files of this package, which decide what a stored capture holds, and whether this process runs them."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path

# The package imports this module first of all its modules that decide anything.
IMPORTED_AT = time.time()
ROOT = Path(__file__).parents[1]


def source_digest() -> str:
    """SHA-256 of all files, so that a change of any of them is another version."""
    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, ROOT.rglob("*.py"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def is_newer_than_this_process() -> bool:
    """Whether a file was changed after this process had begun to import them: it may run the old text."""
    try:
        return any(path.stat().st_ctime > IMPORTED_AT for path in _files())
    except OSError:  # a file is gone
        return True


@cache
def _files() -> tuple[Path, ...]:
    return tuple(filter(Path.is_file, ROOT.rglob("*.py")))
