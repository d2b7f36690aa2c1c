"""The command line on a folder that the library wrote."""

import os
import re
import time
from pathlib import Path

import pytest

from kp_dynamo.cli.main import FAILED, OK, main
from kp_dynamo.disk_cache import entries


def test_list_shows_the_last_used_first(machine, capsys):
    machine.compile(1, 2)
    first, second = machine.entries()
    machine.compile(1)
    assert main(["cache", "list", str(machine.folder)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16] for line in lines[:2]] == [first.name[:16], second.name[:16]]
    assert all(re.fullmatch(r"[0-9a-f]{16} +0\.\d{3} MB +\d+\.\d\d s  used .*", line) for line in lines[:2])
    assert re.fullmatch(r"2 programs, 0\.\d{3} MB, \d+\.\d\d s of compiling", lines[2])


def test_stats_tell_what_was_not_used_for_long(machine, capsys):
    machine.compile(1, 2, 3)
    today, week, year = machine.entries()
    now = time.time()
    os.utime(today, (now + 3600, now + 3600))  # the clock was set back
    os.utime(week, (now - 3 * 86400, now - 3 * 86400))
    os.utime(year, (now - 400 * 86400, now - 400 * 86400))
    today.write_bytes(entries.PROGRAM)
    os.utime(today, (now + 3600, now + 3600))
    assert main(["cache", "stats", str(machine.folder)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert [re.match(r"[^:,]*(?:: \d+ program)?", line)[0] for line in lines] == [
        "3 programs", "used today: 1 program", "used in the last 7 days: 1 program",
        "used in the last 30 days: 0 program", "used before that: 1 program", "largest program", "damaged",
    ]  # fmt: skip
    assert lines[-1] == "damaged: 1"


def test_stats_of_an_empty_folder(tmp_path, capsys):
    assert main(["cache", "stats", str(tmp_path)]) == OK
    assert capsys.readouterr().out.splitlines()[0] == "0 programs, 0.000 MB, 0.00 s of compiling"


def test_verify_finds_what_a_process_would_not_load(machine, capsys):
    machine.compile(1, 2, 3, 4)
    assert main(["cache", "verify", str(machine.folder)]) == OK
    assert "4 programs" in capsys.readouterr().out
    flipped, cut, swapped, whole = machine.entries()
    content = flipped.read_bytes()
    flipped.write_bytes(content[:80] + bytes([content[80] ^ 1]) + content[81:])
    cut.write_bytes(content[:50])
    swapped.write_bytes(whole.read_bytes())
    assert main(["cache", "verify", str(machine.folder)]) == FAILED
    out = capsys.readouterr().out
    assert all(f"{path} is damaged" in out for path in (flipped, cut, swapped))
    assert str(whole) not in out
    assert ", 3 damaged" in out
    main(["cache", "list", str(machine.folder)])
    assert capsys.readouterr().out.count("damaged") == 3
    assert machine.compile(1, 2, 3, 4)["damaged"] == 3


def test_a_file_that_goes_or_cannot_be_read_meanwhile(machine, capsys, monkeypatch):
    """A running process evicts; another user wrote it. A link is not followed, as when programs are loaded."""
    machine.compile(1, 2, 3)
    gone, closed, whole = machine.entries()
    (machine.folder / ("a" * 64)).symlink_to(whole)
    stock = Path.open

    def read(path, *how):
        if path in (gone, closed):
            raise FileNotFoundError(path) if path == gone else PermissionError(path)
        return stock(path, *how)

    monkeypatch.setattr(Path, "open", read)
    assert main(["cache", "verify", str(machine.folder)]) == FAILED
    out = capsys.readouterr().out
    assert f"{closed} cannot be read" in out
    assert "2 programs, " in out
    assert ", 0 damaged" in out
    assert main(["cache", "clear", str(machine.folder)]) == OK
    assert "deleted 1 program," in capsys.readouterr().out
    assert (closed.exists(), whole.exists()) == (True, False)


def test_clear_deletes_programs_and_nothing_else(machine, capsys):
    machine.compile(1)
    other = machine.folder / "notes.txt"
    other.touch()
    assert main(["cache", "clear", str(machine.folder)]) == OK
    assert capsys.readouterr().out.startswith("deleted 1 program, ")
    assert machine.entries() == [other]


def test_clear_keeps_what_only_has_the_name_of_an_entry(tmp_path, capsys):
    """A folder of blobs, such as one of another cache."""
    blob, entry = (tmp_path / (letter * 64) for letter in "ab")
    blob.write_bytes(bytes(range(200)))
    entry.write_bytes(entries.CAPTURE + bytes(200))
    assert main(["cache", "list", str(tmp_path)]) == OK
    assert "0 programs and 1 capture" in capsys.readouterr().out
    assert main(["cache", "clear", str(tmp_path)]) == OK
    assert list(tmp_path.iterdir()) == [blob]


def test_clear_deletes_what_killed_processes_left(tmp_path, capsys):
    old, new = tmp_path / ".writing-0123", tmp_path / ".writing-4567"
    for path in (old, new):
        path.write_bytes(bytes(5000))
    os.utime(old, (time.time() - 4000,) * 2)
    line = "half written by processes that were killed: 1 file, 0.005 MB\n"
    assert main(["cache", "stats", str(tmp_path)]) == OK
    assert capsys.readouterr().out.endswith(line)
    assert main(["cache", "clear", str(tmp_path)]) == OK
    assert capsys.readouterr().out.endswith(line)
    assert list(tmp_path.iterdir()) == [new]


def test_no_folder(tmp_path, capsys):
    assert main(["cache", "list", str(tmp_path / "none")]) == FAILED
    assert "none' is not a folder. Try: the folder given to enable_disk_cache." in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "~nobody-of-this-name/programs"])
def test_a_folder_that_is_no_path(folder, capsys):
    assert main(["cache", "clear", folder]) == FAILED
    assert f"error: folder={folder!r} is invalid: it is no path" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    assert main(["cache", "list", str(tmp_path)]) == FAILED
    assert "cannot be read: Permission denied. Allowed: a folder of your own. Try: " in capsys.readouterr().err


def test_clear_where_a_file_cannot_be_deleted(tmp_path, capsys, monkeypatch):
    """It deletes the others, and says what is left."""
    stays, goes = (tmp_path / (letter * 64) for letter in "ab")
    for path in (stays, goes):
        path.write_bytes(entries.PROGRAM)
    stock = Path.unlink

    def unlink(path, missing_ok=False):
        if path == stays:
            raise OSError(30, "Read-only file system")
        stock(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    assert main(["cache", "clear", str(tmp_path)]) == FAILED
    assert f"1 of 2 files cannot be deleted, such as {stays}: Read-only file system. Try: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [stays]
