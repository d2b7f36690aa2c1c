"""What is in the folder, and what is not believed of it."""

import ctypes
import errno
import hashlib
import os
import resource
import shutil
import stat
import time

import pytest

from kp_dynamo.disk_cache import entries, library
from tests.disk_cache.damage import flip
from tests.disk_cache.process import finish, misses

HEADER = 88


def test_a_second_process_loads_what_the_first_one_saved(machine):
    first = machine.compile(1, 2)
    assert (first["state"], first["saved"], misses(first)) == ("on", 2, {"absent": 2})
    second = machine.compile(2, 1, 1)
    assert (second["hits"], second["saved"], misses(second)) == (3, 0, {})
    assert second["loaded_bytes"] == first["saved_bytes"] // 2 * 3
    assert second["compile_ns"] == 0 < second["load_ns"]
    assert second["avoided_ns"] > 0


def test_an_entry_is_for_its_user_alone(machine):
    machine.compile(1)
    (entry,) = machine.entries()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert len(entry.name) == 64


DAMAGES = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[: HEADER // 2],
    "only the header": lambda content: content[:HEADER],
    "cut in the program": lambda content: content[:-100],
    "longer": lambda content: content + b"\0",
    "magic": flip(0),
    "checksum": flip(8),
    "key": flip(40),
    "size": flip(72),
    "seconds": flip(80),
    "first byte": flip(HEADER),
    "last byte": flip(-1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_compiled_and_written_again(machine, damage):
    machine.compile(1)
    (entry,) = machine.entries()
    content = entry.read_bytes()
    entry.write_bytes(damage(content))
    again = machine.compile(1, 1)
    assert (misses(again), again["hits"], again["saved"]) == ({"damaged": 1}, 1, 1)


def test_an_entry_under_the_name_of_another_is_not_loaded(machine):
    machine.compile(1, 2)
    first, second = machine.entries()
    first.rename(second)
    again = machine.compile(1, 2)
    assert (misses(again), again["saved"]) == ({"absent": 1, "damaged": 1}, 2)


@pytest.mark.parametrize("variable", ["KP_TEST_VERSION", "KP_TEST_KIND"])
def test_an_entry_of_another_version_or_device_is_not_loaded(machine, variable):
    """Under the name that this version and device look for."""
    machine.compile(1, **{variable: "another one"})
    machine.compile(1)
    other, ours = machine.entries()
    shutil.copyfile(other, ours)
    again = machine.compile(1)
    assert (misses(again), again["saved"]) == ({"damaged": 1}, 1)


class Content(ctypes.Structure):
    """`struct entry` of cache.h."""

    _fields_ = (("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t), ("compile_ns", ctypes.c_uint64))


def test_an_error_of_the_disk_is_no_damage(native, tmp_path):
    """EIO, or ESTALE of a file server: the file may be whole, and other processes may read it."""
    folder, key, found = ctypes.CDLL(str(native)), hashlib.sha256(b"key").digest(), Content()
    folder.open_folder(os.fsencode(tmp_path), ctypes.c_uint64(1_000_000))
    program = ctypes.create_string_buffer(b"program")
    folder.write_entry(key, ctypes.byref(Content(ctypes.addressof(program), 7, 1)))
    (entry,) = tmp_path.iterdir()
    before, failing = library.counters(str(native)), ctypes.c_int.in_dll(folder, "read_errno")
    for failing.value in (errno.EIO, errno.ESTALE):
        assert not folder.read_entry(key, ctypes.byref(found))
    failing.value = 0
    after = library.counters(str(native))
    assert (after["unreadable"] - before["unreadable"], after["damaged"] - before["damaged"]) == (2, 0)
    assert entry.exists()
    assert folder.read_entry(key, ctypes.byref(found))
    assert ctypes.string_at(found.bytes, found.size) == b"program"
    entry.write_bytes(entry.read_bytes()[:-1])
    assert not folder.read_entry(key, ctypes.byref(found))
    assert not entry.exists()


FOREIGN = {
    "nothing": lambda program: b"",
    "text": lambda program: b"no program at all" * 100,
    "zeros": lambda program: bytes(len(program)),
    "half of it": lambda program: program[: len(program) // 2],
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_the_compiler_cannot_read_is_compiled(machine, change):
    """With a right checksum, so that XLA gets to see it: as if another XLA under the same version had written it."""
    machine.compile(1)
    (entry,) = machine.entries()
    program = change(entry.read_bytes()[HEADER:])
    about = entries.HEADER.pack(entries.PROGRAM, bytes(32), bytes.fromhex(entry.name), len(program), 1)
    checksum = hashlib.sha256(about[entries._CHECKED_FROM :] + program).digest()
    entry.write_bytes(about[:8] + checksum + about[entries._CHECKED_FROM :] + program)
    again = machine.compile(1, 1)
    assert (misses(again), again["saved"], again["hits"]) == ({"not_loaded": 1}, 1, 1)


@pytest.mark.parametrize("kind", ["link", "folder", "open to others"])
def test_what_another_user_may_have_put_there_is_not_read(machine, tmp_path, kind):
    machine.compile(1)
    (entry,) = machine.entries()
    if kind == "open to others":
        entry.chmod(0o622)
    else:
        entry.rename(tmp_path / "moved")
        entry.symlink_to(tmp_path / "moved") if kind == "link" else entry.mkdir()
    again = machine.compile(1)
    assert (misses(again), again["hits"]) == ({"unreadable": 1}, 0)


def test_the_least_recently_used_go_first(machine):
    size = machine.compile(1, 2)["saved_bytes"] // 2 + HEADER
    third = machine.compile(1, 3, KP_TPU_CACHE_MAX_BYTES=str(2 * size))
    assert (third["hits"], third["saved"], third["evicted"]) == (1, 1, 1)
    after = machine.compile(1, 3)
    assert (after["hits"], misses(after)) == (2, {})


def test_a_program_larger_than_the_bound_is_not_written(machine):
    found = machine.compile(1, KP_TPU_CACHE_MAX_BYTES="1000")
    assert (found["too_large"], found["saved"], machine.entries()) == (1, 0, [])


def test_foreign_files_stay(machine):
    other = machine.folder / "notes.txt"
    other.write_text("mine")
    size = machine.compile(1)["saved_bytes"] + HEADER
    assert machine.compile(2, KP_TPU_CACHE_MAX_BYTES=str(size))["evicted"] == 1
    assert other.read_text() == "mine"


def test_a_full_disk_costs_a_compilation_and_leaves_nothing(machine, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        process = machine.start([{"program": 1}, {"program": 1}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = finish(process)
    assert (found["not_saved"], misses(found), machine.entries()) == (2, {"absent": 2}, [])


def test_half_written_files_are_deleted_after_an_hour(machine):
    old, new = machine.folder / ".writing-1-0", machine.folder / ".writing-2-0"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 4000,) * 2)
    machine.compile(1)
    assert (old.exists(), new.exists()) == (False, True)
