"""The entries of the folder that Python writes: as those of `native/entries.c`, with another magic."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import struct
from pathlib import Path
from typing import NamedTuple

# As `struct header` in entries.c: magic, checksum of what follows it, key, size of the content, nanoseconds to make it.
HEADER = struct.Struct("=8s32s32sQQ")
PROGRAM, CAPTURE = b"KPTPU 1\0", b"KPTPU C1"
KINDS = {PROGRAM: "program", CAPTURE: "capture"}
MAGIC_SIZE = len(CAPTURE)
_CHECKED_FROM = 40
TEMPORARY = ".writing-"
FORGOTTEN_S = 3600.0  # after that, a file under such a name is what a killed process left
NAME = re.compile("[0-9a-f]{64}")


class Entry(NamedTuple):
    """What a whole file holds: its kind ("program" or "capture"), its content, and the seconds to make it."""

    kind: str
    content: bytes
    seconds: float


def is_ours(head: bytes) -> bool:
    """Whether a file of the name of an entry is one, by its first bytes. A power cut leaves it empty, or zeros."""
    return head in KINDS or not any(head)


def parsed(name: str, content: bytes) -> Entry | None:
    """The entry in a file of this name; None if the file is damaged."""
    if len(content) < HEADER.size:
        return None
    magic, checksum, key, size, nanoseconds = HEADER.unpack_from(content)
    if magic not in KINDS or key.hex() != name or size != len(content) - HEADER.size:
        return None
    if hashlib.sha256(memoryview(content)[_CHECKED_FROM:]).digest() != checksum:
        return None
    return Entry(KINDS[magic], content[HEADER.size :], nanoseconds / 1e9)


def read(folder: Path, key: bytes) -> Entry | None:
    """The capture with this key, which is then the last one used; None if the folder has no such capture.

    Raises:
        OSError: The file cannot be read, or is not of this user alone.
        ValueError: It is damaged.
    """
    try:
        file = os.open(folder / key.hex(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(f"{key.hex()} is not a file of this user alone")
        with open(file, "rb", closefd=False) as stream:
            entry = parsed(key.hex(), stream.read())
        if entry is None or entry.kind != "capture":
            raise ValueError(f"{key.hex()} is damaged")
        with contextlib.suppress(OSError):  # of a folder that can only be read: the content is right
            os.utime(file)
    finally:
        os.close(file)
    return entry


def write(folder: Path, key: bytes, content: bytes, seconds: float) -> None:
    """Write a capture under a name that no other process has, then rename it.

    Raises:
        OSError: It cannot be written.
    """
    rest = key + struct.pack("=QQ", len(content), int(seconds * 1e9)) + content
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            stream.write(CAPTURE + hashlib.sha256(rest).digest() + rest)
        temporary.rename(folder / key.hex())
    except OSError:
        with contextlib.suppress(OSError):  # it is the first error that counts
            temporary.unlink(missing_ok=True)
        raise
