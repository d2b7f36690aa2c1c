"""The files in a folder of the disk cache, for the command line.

`native/entries.c` writes programs, `entries.py` writes captures.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kp_dynamo.disk_cache import entries
from kp_dynamo.disk_cache.folder import absolute
from kp_dynamo.exceptions import TPUCacheError


@dataclass(frozen=True)
class Stored:
    """One file of the folder: a program or a capture.

    `seconds` is what it took to compile, for a capture without XLA's part. It is 0.0 if the file is not whole. A file
    that cannot be read may be whole, or not of the cache.
    """

    path: Path
    num_bytes: int
    used_at: float
    seconds: float
    is_whole: bool
    is_capture: bool = False
    is_readable: bool = True


def stored_in(folder: str | os.PathLike[str]) -> list[Stored]:
    """Every program and capture in the folder, the most recently used first. Reads and checks each file.

    Raises:
        TPUCacheError: There is no such folder, or it cannot be read.
    """
    path = absolute(folder)
    if not path.is_dir():
        raise TPUCacheError(f"{str(folder)!r} is not a folder. Try: the folder given to enable_disk_cache.")
    try:
        names = [entry for entry in path.iterdir() if entries.NAME.fullmatch(entry.name)]
    except OSError as cause:
        raise TPUCacheError(
            f"folder={str(folder)!r} cannot be read: {cause.strerror}. Allowed: a folder of your own. "
            "Try: the user that runs enable_disk_cache."
        ) from cause
    found = [stored for entry in names if (stored := _stored(entry)) is not None]
    return sorted(found, key=lambda stored: -stored.used_at)


def forgotten_in(folder: str | os.PathLike[str]) -> list[tuple[Path, int]]:
    """The half-written files that killed processes left in the folder, with their sizes."""
    found = []
    for path in absolute(folder).glob(f"{entries.TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # a running process has renamed or deleted it
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and time.time() - about.st_mtime > entries.FORGOTTEN_S:
                found.append((path, about.st_size))
    return found


def delete(paths: list[Path]) -> None:
    """Delete these files. Processes that have loaded them are not affected.

    Raises:
        TPUCacheError: One of them cannot be deleted. The others are.
    """
    problems = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            problems.append(f"{path}: {problem.strerror}")
    if problems:
        raise TPUCacheError(
            f"{len(problems)} of {len(paths)} files cannot be deleted, such as {problems[0]}. "
            "Try: make the folder writable, and call it again."
        )


def _stored(path: Path) -> Stored | None:
    """What is in the file; None if a running process has deleted it meanwhile, or it is no file of the cache."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            return None
        with path.open("rb") as file:
            if not entries.is_ours(file.read(entries.MAGIC_SIZE)):
                return None
            file.seek(0)
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError:  # it is not for this user to read
        return Stored(path, about.st_size, about.st_mtime, 0.0, is_whole=False, is_readable=False)
    entry = entries.parsed(path.name, content)
    if entry is None:
        is_capture = content.startswith(entries.CAPTURE)
        return Stored(path, len(content), about.st_mtime, 0.0, is_whole=False, is_capture=is_capture)
    return Stored(path, len(content), about.st_mtime, entry.seconds, is_whole=True, is_capture=entry.kind == "capture")
