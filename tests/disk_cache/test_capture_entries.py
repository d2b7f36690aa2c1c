"""Files of captures: what is damaged, exchanged or of another version is compiled, and never believed."""

import errno
import hashlib
import json
import os
import struct
import threading
import time
import zlib

import pytest
import torch

from kp_dynamo.cli.main import FAILED, OK, main
from kp_dynamo.disk_cache import capture_counts, captures, entries
from kp_dynamo.session import stored_captures
from tests.disk_cache.captured import Captures, counted
from tests.disk_cache.damage import flip
from tests.spine import compiled

X = torch.arange(6.0).reshape(2, 3)


def function(x):
    return x.softmax(1) * 3 - 1


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Captures:
    return Captures(tmp_path / "captures", monkeypatch)


def run(kept) -> dict:
    """What the cache did in a new process; the result must be right."""
    kept.new_process()
    with counted() as found:
        result = compiled(function)(X)
    torch.testing.assert_close(result, function(X))
    return found


DAMAGE = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:50],
    "only the header": lambda content: content[: entries.HEADER.size],
    "last byte missing": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "the magic": flip(3),
    "the checksum": flip(9),
    "the key": flip(41),
    "the size": flip(73),
    "the content": flip(120),
    "the last byte": flip(-1),
}


@pytest.mark.quick("the content", "last byte missing")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_replaced(kept, name, capsys):
    run(kept)
    (entry,) = kept.entries()
    entry.write_bytes(content := DAMAGE[name](entry.read_bytes()))
    # Without the magic, it may be anybody's file; but a loss of power leaves an entry empty.
    is_known = not content or content.startswith(entries.CAPTURE)
    assert main(["cache", "verify", str(kept.folder)]) == (FAILED if is_known else OK)
    assert (f"{entry} is damaged" in capsys.readouterr().out) == is_known
    assert run(kept) == {"stored": 1, "misses": {"damaged": 1}}
    assert run(kept) == {"loaded": 1}
    assert main(["cache", "verify", str(kept.folder)]) == OK


def test_a_program_is_no_capture(kept):
    run(kept)
    (entry,) = kept.entries()
    entry.write_bytes(entries.PROGRAM + entry.read_bytes()[8:])
    assert run(kept) == {"stored": 1, "misses": {"damaged": 1}}


def test_files_that_were_exchanged(kept):
    run(kept)
    (entry,) = kept.entries()
    kept.new_process()
    compiled(lambda x: x + 1)(X)
    (other,) = set(kept.entries()) - {entry}
    entry.write_bytes(other.read_bytes())
    assert run(kept) == {"stored": 1, "misses": {"damaged": 1}}


def rewrite(entry, change) -> None:
    """Change the head of a capture, with a right checksum."""
    content = entry.read_bytes()[entries.HEADER.size :]
    start = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(zlib.decompress(content[8:start]))
    modules = change(head, content[start:])
    text = zlib.compress(json.dumps(head).encode())
    content = len(text).to_bytes(8, "little") + text + modules
    entries.write(entry.parent, bytes.fromhex(entry.name), content, 1.0)


def _set(*path, to):
    def change(head, modules):
        inner = head
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = to
        return modules

    return change


def _delete(name):
    def change(head, modules):
        del head[name]
        return modules

    return change


def _module(head, content):
    packed = zlib.compress(content)
    head["sizes"] = [len(packed)]
    return packed


GRAPH = ("graphs", "inference")
# Whatever a file of this name holds, with a right checksum.
STRANGE = {
    "another key": (_set("key", to="another"), "damaged"),
    "another schema": (_set("schema", to=99), "damaged"),
    "no sizes": (_delete("sizes"), "damaged"),
    "modules of other sizes": (_set("sizes", to=[3]), "damaged"),
    "no module": (lambda head, modules: (head.update(sizes=[0]), b"")[1], "not_loaded"),
    "a module that is not compressed": (lambda head, modules: b"?" * len(modules), "not_loaded"),
    "a module that is none": (lambda head, modules: _module(head, b"?" * 100), "not_loaded"),
    "an empty module": (lambda head, modules: _module(head, b""), "not_loaded"),
    "no graphs": (_set("graphs", to={}), "not_loaded"),
    "other graphs": (_set("graphs", to={"joint": {}}), "not_loaded"),
    "no interface": (_delete("interface"), "not_loaded"),
    "an interface with more": (_set("interface", "more", to=1), "not_loaded"),
    "unknown metadata": (_set("interface", "others", to={"unknown": 1}), "not_loaded"),
    "a graph with more": (_set(*GRAPH, "more", to=1), "not_loaded"),
    "another input": (_set(*GRAPH, "inputs", to=[["float32", [9], [1]]]), "not_loaded"),
    "a dtype that is none": (_set(*GRAPH, "results", to=[["nn", [2], [1]]]), "not_loaded"),
    "another result of the module": (_set(*GRAPH, "outputs", to=[["root", 7]]), "not_loaded"),
    "an argument that is none": (_set(*GRAPH, "outputs", to=[["argument", 1]]), "not_loaded"),
    "more outputs": (_set(*GRAPH, "outputs", to=[["root", 0], ["root", 0]]), "not_loaded"),
    "fewer results": (_set(*GRAPH, "results", to=[]), "not_loaded"),
    "more results": (_set("interface", "outputs", to=[["non_alias", False]] * 2), "not_loaded"),
    "another parameter": (_set(*GRAPH, "parameters", to=[[1, "float32", [2, 3]]]), "not_loaded"),
    "a list": (lambda head, modules: (head.clear(), b"")[1], "damaged"),
}


@pytest.mark.quick("another key", "a module that is none", "unknown metadata")
@pytest.mark.parametrize("name", STRANGE)
def test_strange_content(kept, name):
    run(kept)
    (entry,) = kept.entries()
    change, miss = STRANGE[name]
    rewrite(entry, change)
    assert run(kept) == {"stored": 1, "misses": {miss: 1}}
    assert run(kept) == {"loaded": 1}


@pytest.mark.parametrize(
    ("problem", "stays"),
    [
        (RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: out of memory"), True),
        (OSError(116, "Stale file handle"), True),
        (RuntimeError("INVALID_ARGUMENT: no such computation"), False),
    ],
    ids=["a full device", "a file server", "the content"],
)
def test_a_capture_is_deleted_only_for_its_content(monkeypatch, problem, stays):
    """Other processes may still load it."""
    discarded = []

    def fail(*_):
        raise problem

    monkeypatch.setattr(stored_captures, "_callable", fail)
    monkeypatch.setattr(captures, "load", lambda key: ({}, []))
    monkeypatch.setattr(captures, "discard", lambda key, reason: discarded.append(key))
    with counted() as found:
        assert stored_captures.load_capture("key", None, 0, None) is None
    assert (found, discarded) == (({"misses": {"not_loaded": 1}}, []) if stays else ({}, ["key"]))


def test_a_content_that_would_fill_the_memory(kept, monkeypatch):
    run(kept)
    monkeypatch.setattr(captures, "_MAX_BYTES", 100)
    assert run(kept) == {"stored": 1, "misses": {"damaged": 1}}


@pytest.mark.slow
def test_a_file_that_others_can_write_to(kept):
    run(kept)
    (entry,) = kept.entries()
    entry.chmod(0o666)
    assert run(kept)["misses"] == {"unreadable": 1}


@pytest.mark.slow
def test_a_link(kept, tmp_path):
    run(kept)
    (entry,) = kept.entries()
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert run(kept)["misses"] == {"unreadable": 1}


def test_a_file_is_of_its_user_alone(kept):
    run(kept)
    (entry,) = kept.entries()
    assert entry.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_went_away(kept):
    kept.folder.rmdir()
    assert run(kept) == {"misses": {"absent": 1}, "not_stored": {"not written": 1}}


def test_a_damaged_file_that_cannot_be_deleted(kept, monkeypatch):
    run(kept)
    (entry,) = kept.entries()
    entry.write_bytes(flip(120)(entry.read_bytes()))

    def unlink(self, missing_ok=False):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(type(entry), "unlink", unlink)
    assert run(kept)["misses"] == {"damaged": 1}


def test_no_descriptor_stays_open(kept):
    run(kept)
    (entry,) = kept.entries()
    entry.unlink()
    entry.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="is not a file of this user alone"):
            entries.read(kept.folder, bytes.fromhex(entry.name))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_the_bound_of_the_folder(kept, monkeypatch):
    """The last one used stays, also beside programs; a capture above the bound is not written."""
    run(kept)
    (entry,) = kept.entries()
    size = entry.stat().st_size
    program = kept.folder / ("0" * 64)
    program.write_bytes(entries.PROGRAM.ljust(size, b"\0"))
    os.utime(program, (1, 1))
    other = kept.folder / "not an entry"
    other.write_bytes(bytes(10 * size))
    monkeypatch.setattr(captures, "max_bytes", lambda: 2 * size + size // 2)
    kept.new_process()
    compiled(lambda x: x.softmax(1) * 3 - 2)(X)
    assert {entry, other} < set(kept.entries())
    assert program not in kept.entries()
    monkeypatch.setattr(captures, "max_bytes", lambda: 1000)
    entry.unlink()
    assert run(kept) == {"misses": {"absent": 1}, "not_stored": {"too large": 1}}


def test_a_capture_that_is_loaded_was_used_last(kept):
    run(kept)
    (entry,) = kept.entries()
    os.utime(entry, (1, 1))
    run(kept)
    assert time.time() - entry.stat().st_mtime < 60


def test_a_capture_whose_time_cannot_be_set(tmp_path, monkeypatch):
    """As on a file system that can only be read."""

    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    key = hashlib.sha256(b"key").digest()
    entries.write(tmp_path, key, b"content", 1.0)
    monkeypatch.setattr(os, "utime", fail)
    assert entries.read(tmp_path, key) == entries.Entry("capture", b"content", 1.0)


@pytest.mark.slow
def test_many_writers_of_one_entry(tmp_path):
    """Each reader sees a whole entry."""
    key = hashlib.sha256(b"key").digest()
    contents = [bytes([i]) * (1000 + i) for i in range(4)]
    entries.write(tmp_path, key, contents[0], 1.0)
    threads = [
        threading.Thread(target=lambda content=content: [entries.write(tmp_path, key, content, 1.0) for _ in range(50)])
        for content in contents
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = entries.read(tmp_path, key)
        assert found is not None
        assert found.content in contents
    assert [path.name for path in tmp_path.iterdir()] == [key.hex()]


def test_the_command_line_shows_captures(kept, capsys):
    run(kept)
    (kept.folder / ("0" * 64)).write_bytes(entries.PROGRAM)
    assert main(["cache", "list", str(kept.folder)]) == OK
    out = capsys.readouterr().out
    assert "  capture\n" in out
    assert "1 program and 1 capture, 0.00" in out
    assert main(["cache", "clear", str(kept.folder)]) == OK
    assert "deleted 1 program and 1 capture" in capsys.readouterr().out
    assert not kept.entries()


def test_the_header_is_that_of_programs():
    """`native/entries.c` counts and deletes both kinds."""
    assert struct.calcsize("=8s32s32sQQ") == entries.HEADER.size == 88
    assert len(entries.PROGRAM) == len(entries.CAPTURE) == 8


def test_the_counters_have_seconds(kept):
    run(kept)
    run(kept)
    stats = capture_counts.stats()
    assert stats["load_s"] > 0
    assert stats["avoided_s"] > 0
