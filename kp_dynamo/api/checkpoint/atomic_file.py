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
    that is killed leaves its scratch folder behind; the next process that writes into the same folder removes it.

    Raises:
        OSError: The folder cannot be written to, the disk is full, or `path` is a folder, pipe, socket or device,
            which a rename would destroy; `path` is unchanged.
    """
    target = os.path.realpath(path)
    _require_regular(target)
    folder = os.path.dirname(target)
    _remove_abandoned(folder)
    with _scratch_folder(folder) as scratch:
        written = os.path.join(scratch, "file")
        mode = _mode_for(target, written)
        yield written
        os.chmod(written, mode)
        _make_durable(written)
        _require_regular(target)  # again: writing takes a while
        os.replace(written, target)
    _make_durable(folder)


def _require_regular(target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise OSError(f"{target!r} is not a regular file")


@contextlib.contextmanager
def _scratch_folder(folder: str) -> Iterator[str]:
    """A locked scratch folder inside `folder`; other processes treat it as abandoned once the lock is released."""
    while True:
        scratch = tempfile.mkdtemp(_SUFFIX, _PREFIX, folder)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(scratch, os.O_RDONLY)
            _try_lock(lock, fcntl.LOCK_EX)
            if os.path.isdir(scratch):
                break
            os.close(lock)  # another process removed it as abandoned before it was locked
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(folder: str) -> None:
    """Remove scratch folders that no running process has locked."""
    for name in os.listdir(folder):
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            scratch = os.path.join(folder, name)
            # It may be removed already, or there is no permission to open it.
            with contextlib.suppress(OSError), opened(scratch, os.O_RDONLY | os.O_DIRECTORY) as lock:
                if _try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(scratch, ignore_errors=True)


def _try_lock(lock: int, how: int) -> bool:
    """Whether the lock was acquired. Always False on a file system without locks, so nothing counts as abandoned."""
    try:
        fcntl.flock(lock, how)
    except OSError:
        return False
    return True


def _mode_for(target: str, probe: str) -> int:
    """Permissions for the new file; creating `probe` reveals the umask, which cannot be read without setting it."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(os.stat(target).st_mode)
    with opened(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666) as made:
        return stat.S_IMODE(os.fstat(made).st_mode)


def _make_durable(path: str) -> None:
    with opened(path, os.O_RDONLY) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> Iterator[int]:
    """A file descriptor, closed after the block."""
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)
