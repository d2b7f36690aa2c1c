"""`doctor --cache`: on a real plugin, on XLA:CPU, and everything it can find wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kp_dynamo.cli.check_disk_cache import check_disk_cache
from kp_dynamo.disk_cache import trial
from tests.disk_cache.process import HERE, ROOT, build, plugin_folder

# Prints the first argument in the first process, and the second one in the second.
TELL = """import os, sys
ran = os.path.join(sys.argv[3], "ran")
print(sys.argv[2 if os.path.exists(ran) else 1], flush=True)
open(ran, "w").close()
"""
NO_MISSES = {"absent": 0, "damaged": 0}
COUNTS = {"state": "on", "saved_bytes": 1_000_000, "compile_s": 2.0, "load_s": 0.1, "unsaved": {"not_serialized": 0}}
RIGHT = {"difference": 1e-7, "allowed": 1e-5, "digest": "aa"}
FIRST = {**RIGHT, "disk": {**COUNTS, "saved": 3, "hits": 0, "misses": {**NO_MISSES, "absent": 3}}}
SECOND = {**RIGHT, "disk": {**COUNTS, "saved": 0, "hits": 3, "misses": NO_MISSES}}


@pytest.fixture
def processes(monkeypatch):
    """Puts two programs that print these values in the place of the self-test."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")

    def put(first: dict, second: dict) -> None:
        command = (sys.executable, "-c", TELL, json.dumps(first), json.dumps(second))
        monkeypatch.setattr(trial, "SELF_TEST", command)

    return put


def test_a_second_process_that_loads_everything(processes):
    processes(FIRST, SECOND)
    check = check_disk_cache(60)
    assert check.status == "ok"
    assert "compiled and saved 3 programs in 2.00 s (1.00 MB); the second loaded them in 0.10 s" in check.message


def _changed(told: dict, disk: dict | None = None, **fields: object) -> dict:
    return {**told, **fields, "disk": {**told["disk"], **(disk or {})}}


WRONG = {
    "off": (_changed(FIRST, {"state": "the plugin lacks a function"}), SECOND, "off in the first process: the plugin"),
    "nothing saved": (
        _changed(FIRST, {"saved": 0, "unsaved": {"not_serialized": 3, "not_saved": 0}}),
        SECOND,
        "the first process saved no program: not_serialized 3",
    ),
    "compiled again": (
        FIRST,
        _changed(SECOND, {"hits": 1, "misses": {"absent": 0, "not_loaded": 2}}),
        "the second process loaded 1 programs and compiled others again: not_loaded 2",
    ),
    "wrong": (FIRST, _changed(SECOND, difference=0.5), "the second process differs from eager by 5.0e-01"),
    "no number": (FIRST, _changed(SECOND, difference=float("nan")), "the second process differs from eager by nan"),
    "other bits": (FIRST, _changed(SECOND, digest="bb"), "loaded compute other results than in the first"),
    "stopped": (FIRST, {"device": "xla:0"}, "the second process stopped: its process ended with 0"),
}


@pytest.mark.parametrize(("first", "second", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(processes, first, second, message):
    processes(first, second)
    check = check_disk_cache(60)
    assert (check.status, message in check.message) == ("failed", True), check.message


def test_a_process_that_raises_is_quoted(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", "raise ValueError('the library was not built')"))
    check = check_disk_cache(60)
    assert check.message == "the first process stopped: ValueError: the library was not built"


def test_on_the_cpu_nothing_is_started(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(trial, "SELF_TEST", ("/nowhere",))
    check = check_disk_cache(60)
    assert check.status == "ok"
    assert check.message.startswith("there are no programs to keep on this device: XLA:CPU is a part of torch_xla")


PLUGIN = """
import os
from torch_xla.experimental import plugins

class Plugin(plugins.DevicePlugin):
    def library_path(self):
        return os.environ["TEST_FRONT"]
    def client_create_options(self):
        return {"cpu_device_count": 1}
"""


def install_plugin(folder: Path) -> dict[str, str]:
    """A distribution whose entry point registers the plugin with torch_xla, as vendors of plugins do.

    Returns the environment of a process that uses it.
    """
    plugin = plugin_folder()
    assert plugin is not None, "Try: make setup, which installs xla-cpu-pjrt"
    (folder / "vendor.py").write_text(PLUGIN)
    about = folder / "vendor-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch_xla.plugins]\nCPUP = vendor:Plugin\n")
    return {
        **os.environ,
        "PJRT_DEVICE": "CPUP",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "TEST_FRONT": str(build(folder / "front.so", HERE / "front_plugin.c")),
        "KP_TEST_PLUGIN": str(plugin / "xla_cpu_pjrt.so"),
    }


@pytest.mark.slow
def test_doctor_on_a_device_with_a_plugin(tmp_path):
    environment = install_plugin(tmp_path)
    command = [sys.executable, "-m", "kp_dynamo", "doctor", "--cache", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    check = json.loads(done.stdout)["checks"][-1]
    assert (done.returncode, check["name"], check["status"]) == (0, "disk cache", "ok"), done.stdout + done.stderr
    assert "its results are equal to the last bit" in check["message"]
