"""Replace a file atomically, even if the process is killed meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

_PREFIX, _SUFFIX = ".kp_tpu-", ".tmp"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a path to write to; if the block ends without an error, that file replaces `path` in one rename.

    The file is written in a scratch folder beside `path`, synced to disk and renamed, and the rename is synced too.
    Symbolic links are followed. The new file gets the permissions of the old one, else those of the umask. A process
    that is killed leaves its scratch folder behind; a later one that writes into the same folder alone removes it.

    Raises:
        OSError: The folder cannot be written to, the disk is full, or `path` is a folder, pipe, socket or device,
            which a rename would destroy; `path` is unchanged.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    _require_regular(target)
    with opened(folder, os.O_RDONLY) as lock:
        _remove_abandoned(folder, lock)
        scratch = tempfile.mkdtemp(_SUFFIX, _PREFIX, folder)
        try:
            written = os.path.join(scratch, "file")
            mode = _mode_for(target, written)
            yield written
            os.chmod(written, mode)
            with opened(written, os.O_RDONLY) as file:
                os.fsync(file)
            _require_regular(target)  # again: writing takes a while
            os.replace(written, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        os.fsync(lock)


def _require_regular(target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise OSError(f"{target!r} is not a regular file")


def _remove_abandoned(folder: str, lock: int) -> None:
    """Remove all scratch folders if nobody else writes here; writers share a lock, which ends with their process.

    On a file system without locks nothing counts as abandoned.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in os.listdir(folder):
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)


def _mode_for(target: str, probe: str) -> int:
    """Permissions for the new file; creating `probe` reveals the umask, which cannot be read without setting it."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(os.stat(target).st_mode)
    with opened(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666) as made:
        return stat.S_IMODE(os.fstat(made).st_mode)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> Iterator[int]:
    """A file descriptor, closed after the block."""
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)
