"""The folder of the disk cache. What is loaded from it is machine code, so nobody else may write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kp_dynamo.exceptions import TPUCacheError


def private_folder(folder: str | os.PathLike[str]) -> Path:
    """`folder` as an absolute path, created for this user alone if it does not exist.

    Raises:
        TPUCacheError: It is no path, is a file, belongs to somebody else, or others can write to it.
    """
    path = absolute(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.stat()
    except OSError as cause:
        raise _refusal(folder, f"it cannot be created ({cause.strerror})") from cause
    if about.st_uid != os.geteuid():
        raise _refusal(path, f"it belongs to user {about.st_uid}, and this process runs as {os.geteuid()}")
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, f"others can write to it (mode {stat.S_IMODE(about.st_mode):04o}); chmod 700 closes it")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _refusal(path, "it cannot be written")
    return path


def absolute(folder: str | os.PathLike[str]) -> Path:
    """`folder` as an absolute path, with the home of its user.

    Raises:
        TPUCacheError: It is no path. An empty one would be the current folder.
    """
    if not isinstance(folder, str | os.PathLike) or not str(folder) or "\0" in str(folder):
        raise _refusal(folder, "it is no path")
    try:
        return Path(folder).expanduser().absolute()
    except (OSError, RuntimeError, TypeError) as cause:  # no current folder, no home, a path of bytes
        raise _refusal(folder, f"it is no path ({str(cause).rstrip('.')})") from cause


def _refusal(path: str | os.PathLike[str], reason: str) -> TPUCacheError:
    return TPUCacheError(
        f"folder={str(path)!r} is invalid: {reason}. Allowed: a folder of your own; programs are loaded from it as "
        "machine code. Try: a new folder, which is then created with mode 0700."
    )
