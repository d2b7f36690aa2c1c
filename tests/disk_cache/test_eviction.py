"""The folder's bound, as C and Python keep it: what counts, what goes first, and what is not the cache's."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kp_dynamo.disk_cache import contents, entries, eviction, library

SIZE = 100
DAY_S = 86400


def evict_in_c(native: Path, folder: Path, max_bytes: int, written: str) -> int:
    before, descriptor = library.counters(str(native))["evicted"], os.open(folder, os.O_DIRECTORY)
    ctypes.CDLL(str(native)).evict(descriptor, ctypes.c_uint64(max_bytes), written.encode() or None)
    os.close(descriptor)
    return library.counters(str(native))["evicted"] - before


@pytest.fixture(params=["C", "Python"])
def evict(request, native, tmp_path) -> Callable[..., int]:
    """Keeps the bound of the folder, and returns how many entries it deleted."""

    def run(max_bytes: int, written: str = "") -> int:
        if request.param == "C":
            return evict_in_c(native, tmp_path, max_bytes, written)
        return eviction.evict(tmp_path, max_bytes, written)

    return run


def entry(folder: Path, letter: str, age_s: float, magic: bytes = entries.PROGRAM) -> Path:
    """A file with the name of an entry that was used `age_s` ago."""
    path = folder / (letter * 64)
    path.write_bytes(magic.ljust(SIZE, b"\0"))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("100", 100),
        ("2e9", 2_000_000_000),
        ("1.5", 1),
        ("0.5", 0),
        ("-1", 0),
        ("inf", 0),
        ("nan", 0),
        ("9 GB", 0),
        ("", 0),
    ],
)
def test_the_variable_of_the_bound(native, text, bound):
    """What is no number of bytes keeps nothing in a folder, and deletes nothing."""
    bound_of = ctypes.CDLL(str(native)).bound_of
    bound_of.restype = ctypes.c_uint64
    assert bound_of(text.encode()) == bound


@pytest.mark.parametrize("content", [b"", bytes(SIZE)])
def test_what_a_power_cut_left_of_an_entry(evict, tmp_path, content):
    left = entry(tmp_path, "a", 9)
    left.write_bytes(content)
    os.utime(left, (time.time() - 9,) * 2)
    new = entry(tmp_path, "b", 5)
    assert evict(SIZE - 1, new.name) == 1
    assert list(tmp_path.iterdir()) == [new]
    assert [stored.path for stored in contents.stored_in(tmp_path)] == [new]


def test_the_least_recently_used_goes_first(evict, tmp_path):
    new, old, middle = (entry(tmp_path, letter, age) for letter, age in zip("abc", (10, 30, 20), strict=True))
    assert evict(3 * SIZE) == 0
    assert evict(2 * SIZE) == 1
    assert sorted(tmp_path.iterdir()) == [new, middle]
    assert not old.exists()


def test_a_file_that_only_has_the_name_of_an_entry(evict, tmp_path):
    """It neither counts nor goes: folders of blobs have such names."""
    blob, ours = entry(tmp_path, "a", 9, b"a blob"), entry(tmp_path, "b", 5, entries.CAPTURE)
    (tmp_path / ("c" * 64)).touch()
    assert evict(SIZE) == 0
    assert evict(SIZE - 1) == 1
    assert (blob.exists(), ours.exists()) == (True, False)


def test_half_written_files_count(evict, tmp_path):
    old, new = entry(tmp_path, "a", 20), entry(tmp_path, "b", 10)
    (tmp_path / ".writing-0123").write_bytes(bytes(SIZE))
    assert evict(2 * SIZE) == 1
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(("reason", "is_other_deleted"), [(errno.ENOENT, False), (errno.EACCES, True)])
def test_a_file_that_cannot_be_deleted(evict, native, tmp_path, monkeypatch, reason, is_other_deleted):
    """One that is gone needs no room. One that stays does, so the next one goes."""
    old, new = entry(tmp_path, "a", 20), entry(tmp_path, "b", 10)
    failing, stock = ctypes.CDLL(str(native)), Path.unlink

    def unlink(path, missing_ok=False):
        if path != old:
            stock(path)
        elif not missing_ok or reason != errno.ENOENT:
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(Path, "unlink", unlink)
    ctypes.c_int.in_dll(failing, "unlink_errno").value = reason
    name = ctypes.c_char_p.in_dll(failing, "not_deleted")
    name.value = old.name.encode()
    try:
        assert evict(SIZE) == is_other_deleted
    finally:
        name.value = None
    assert new.exists() != is_other_deleted


def test_after_the_clock_was_set_back(evict, tmp_path):
    """Entries of the future are no newer than those that are written from here on."""
    for letter in "ab":
        entry(tmp_path, letter, -DAY_S)
    assert evict(2 * SIZE - 1) == 1
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mtime <= time.time()
    written = entry(tmp_path, "c", 0)
    assert evict(SIZE, written.name) == 1
    assert list(tmp_path.iterdir()) == [written]


def test_what_was_just_written_stays(evict, tmp_path):
    """The clock of a file server may be behind."""
    written, other = entry(tmp_path, "a", 100), entry(tmp_path, "b", 10)
    assert evict(SIZE, written.name) == 1
    assert (written.exists(), other.exists()) == (True, False)


def test_a_process_that_opens_the_folder_keeps_its_bound(native, tmp_path):
    """Its bound may be smaller than that of earlier processes, and it may write nothing."""
    old, new = entry(tmp_path, "a", 20), entry(tmp_path, "b", 10)
    half = tmp_path / ".writing-0123"
    half.write_bytes(bytes(SIZE))
    os.utime(half, (time.time() - 4000,) * 2)
    opened = ctypes.CDLL(str(native))
    opened.open_folder.restype = ctypes.c_char_p
    assert opened.open_folder(os.fsencode(tmp_path), ctypes.c_uint64(SIZE)) is None
    assert list(tmp_path.iterdir()) == [new]
    assert not old.exists()
