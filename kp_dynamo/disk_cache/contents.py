"""The programs in a folder of the disk cache, for the command line. `native/entries.c` writes and loads them."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from kp_dynamo.exceptions import TPUCacheError

# As `struct header` in entries.c: magic, checksum of what follows, key, size of the program, nanoseconds to compile it.
_HEADER = struct.Struct("=8s32s32sQQ")
_CHECKED_FROM = 40
_MAGIC = b"KPTPU 1\0"
_NAME = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Program:
    """One file of the folder. `compile_s` is 0.0 if the file is not whole."""

    path: Path
    num_bytes: int
    used_at: float
    compile_s: float
    is_whole: bool


def programs(folder: str | os.PathLike[str]) -> list[Program]:
    """Every program in the folder, the most recently used first. Reads and checks each file.

    Raises:
        TPUCacheError: There is no such folder.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise TPUCacheError(f"{str(folder)!r} is not a folder. Try: the folder given to enable_disk_cache.")
    found = [_program(entry) for entry in path.iterdir() if _NAME.fullmatch(entry.name) and entry.is_file()]
    return sorted(found, key=lambda program: -program.used_at)


def delete(found: list[Program]) -> None:
    """Delete these programs. Processes that have loaded them are not affected."""
    for program in found:
        program.path.unlink(missing_ok=True)


def _program(path: Path) -> Program:
    content, about = path.read_bytes(), path.stat()
    is_whole, compile_s = False, 0.0
    if len(content) >= _HEADER.size:
        magic, checksum, key, size, compile_ns = _HEADER.unpack_from(content)
        is_whole = (
            magic == _MAGIC
            and key.hex() == path.name
            and size == len(content) - _HEADER.size
            and hashlib.sha256(content[_CHECKED_FROM:]).digest() == checksum
        )
        compile_s = compile_ns / 1e9 if is_whole else 0.0
    return Program(path, len(content), about.st_mtime, compile_s, is_whole)
