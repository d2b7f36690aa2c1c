"""SHA-256 of the library against hashlib's, with the processor's instructions (if it has them) and without."""

import ctypes
import hashlib
import random

import pytest

from tests.disk_cache.process import NATIVE, build

SIZES = [*range(260), 1000, 4096, 65_537, 1_000_003]


@pytest.fixture(scope="module", params=["instructions", "portable"])
def digest(request, tmp_path_factory):
    """Of chunks that are added one after another."""
    macros = {"KP_PORTABLE": "1"} if request.param == "portable" else {}
    to = tmp_path_factory.mktemp("sha256") / "sha256.so"
    library = ctypes.CDLL(str(build(to, NATIVE / "sha256.c", visibility="default", **macros)))

    def call(*chunks: bytes) -> bytes:
        state, found = ctypes.create_string_buffer(1024), ctypes.create_string_buffer(32)
        library.sha256_start(state)
        for chunk in chunks:
            library.sha256_add(state, chunk, ctypes.c_size_t(len(chunk)))
        library.sha256_finish(state, found)
        return found.raw

    return call


def test_every_size_around_a_block(digest):
    content = random.Random(0).randbytes(max(SIZES))
    for size in SIZES:
        assert digest(content[:size]) == hashlib.sha256(content[:size]).digest()


def test_chunks(digest):
    """A block that is filled in parts, and whole blocks after it."""
    generator = random.Random(1)
    for _ in range(300):
        chunks = [generator.randbytes(generator.choice([0, 1, 63, 64, 65, 200])) for _ in range(5)]
        assert digest(*chunks) == hashlib.sha256(b"".join(chunks)).digest()
