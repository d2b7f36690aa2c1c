"""Whatever is wrong with the plugin or the folder, programs compile, and the state or a counter says why."""

import ctypes
import os
import shutil

import pytest

from tests.disk_cache.process import misses

OFF = {
    "too old": {"KP_TEST_MINOR": "74"},
    "too new": {"KP_TEST_MINOR": "116"},
    "other ABI": {"KP_TEST_FAULT": "major"},
    "short table": {"KP_TEST_FAULT": "short table"},
    "missing function": {"KP_TEST_FAULT": "missing function"},
    "no folder": {"KP_TPU_CACHE_DIR": ""},
    "folder does not exist": {"KP_TPU_CACHE_DIR": "/nowhere"},
    "folder is a file": {"KP_TPU_CACHE_DIR": __file__},
}
REASONS = {
    "too old": "a version of the PJRT C API",
    "too new": "a version of the PJRT C API",
    "other ABI": "a version of the PJRT C API",
    "short table": "table of functions is too short",
    "missing function": "lacks a function",
    "no folder": "no folder was given",
    "folder does not exist": "cannot be opened",
    "folder is a file": "cannot be opened",
}


@pytest.mark.parametrize("case", OFF)
def test_the_cache_is_off_and_says_why(machine, case):
    found = machine.compile(1, **OFF[case])
    assert REASONS[case] in found["state"]
    assert {name: value for name, value in found.items() if value and name not in ("state", "seconds")} == {}
    assert (len(found["seconds"]), machine.entries()) == (1, [])


def test_a_folder_that_others_can_write_to(machine):
    machine.folder.chmod(0o770)
    assert "others can write to it" in machine.compile(1)["state"]
    assert machine.entries() == []


def test_a_plugin_that_cannot_serialize(machine):
    found = machine.compile(1, 1, KP_TEST_FAULT="serialize")
    assert (found["state"], found["not_serialized"], misses(found)) == ("on", 2, {"absent": 2})
    assert machine.entries() == []


def test_a_plugin_that_refuses_what_it_wrote(machine):
    machine.compile(1)
    found = machine.compile(1, KP_TEST_FAULT="load")
    assert (misses(found), found["hits"], found["saved"]) == ({"not_loaded": 1}, 0, 1)
    machine.compile(1, KP_TEST_FAULT="load serialize")
    assert machine.entries() == []


@pytest.mark.slow
def test_a_device_that_is_full(machine):
    """Other processes still load the program."""
    machine.compile(1)
    found = machine.compile(1, KP_TEST_FAULT="load full serialize")
    assert (misses(found), found["hits"], found["saved"]) == ({"not_loaded": 1}, 0, 0)
    assert machine.compile(1)["hits"] == 1


def test_a_plugin_that_cannot_name_its_devices(machine):
    found = machine.compile(1, KP_TEST_FAULT="devices")
    assert (misses(found), found["saved"], machine.entries()) == ({"no_key": 1}, 0, [])


def test_an_error_of_the_compiler_arrives_unchanged(machine):
    process = machine.start([{"program": 1, "options": "ffff"}])
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RuntimeError: " in message
    assert machine.entries() == []


def test_without_a_plugin_behind_it_says_so(machine):
    process = machine.start([{"program": 1}], KP_TPU_CACHE_PLUGIN="/nowhere.so")
    _, message = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "the disk cache cannot load the PJRT plugin behind it: /nowhere.so" in message


def test_a_library_that_is_its_own_plugin(library, tmp_path, capfd):
    """As the child of a process that uses another installation of this package might set it."""
    path = shutil.copy(library, tmp_path / "library.so")  # what is loaded from another path has a state of its own
    loaded = ctypes.CDLL(str(path))
    loaded.kp_cache_configure(os.fsencode(path), b"", ctypes.c_uint64(0))
    loaded.GetPjrtApi.restype = ctypes.c_void_p
    assert loaded.GetPjrtApi() is None
    assert "the PJRT plugin behind the disk cache is the disk cache itself" in capfd.readouterr().err
