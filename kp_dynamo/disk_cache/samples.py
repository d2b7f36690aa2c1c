"""Samples of a file that identify its content, for one too large to be read whole at each start."""

from __future__ import annotations

import hashlib
import os

# As `add_file` in native/key.c.
_NUM_SAMPLES, _SAMPLE_BYTES, _END_BYTES = 32, 1 << 15, 1 << 20


def sampled(path: str) -> str:
    """SHA-256 of the size of a file, its beginning, its end and samples between them.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        between = [(size // _NUM_SAMPLES * number, _SAMPLE_BYTES) for number in range(_NUM_SAMPLES)]
        for start, length in ((0, _END_BYTES), *between, (max(0, size - _END_BYTES), _END_BYTES)):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()
