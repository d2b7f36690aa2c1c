"""`doctor`: one run on this machine for real, and every way it can find something wrong."""

import json
import re
import subprocess
import sys
from importlib import metadata

import pytest

from kp_dynamo.cli import doctor
from kp_dynamo.cli.checks import Check
from kp_dynamo.cli.doctor import Diagnosis, diagnose
from kp_dynamo.compat.known_limits import KNOWN_LIMITS
from kp_dynamo.disk_cache import trial
from kp_dynamo.exceptions import TPUConfigurationError

WELL = """import json
print(json.dumps({"device": "xla:0", "kind": "CPU"}), flush=True)
print(json.dumps({"difference": 1e-7, "allowed": 1e-5}), flush=True)
"""


@pytest.fixture
def self_test(monkeypatch):
    """Puts another program in the place of the self-test."""
    monkeypatch.setattr(doctor, "check_versions", lambda: {"torch": "2.9.1", "torch_xla": "2.9.0"})
    return lambda program: monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", program))


def failed(diagnosis):
    return [(check.name, check.message) for check in diagnosis.checks if check.status == "failed"]


def test_this_machine_is_well():
    diagnosis = diagnose()
    assert failed(diagnosis) == []
    assert [check.name for check in diagnosis.checks] == ["versions", "registration", "device", "self-test"]
    assert "xla:0 starts, a CPU" in diagnosis.checks[2].message
    assert re.search(r"differ from eager by \d\.\de-\d\d, allowed 1e-05", diagnosis.checks[3].message)


def test_versions_and_settings_are_named(self_test, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    self_test(WELL)
    diagnosis = diagnose()
    assert diagnosis.is_healthy
    assert diagnosis.versions["torch"] == metadata.version("torch")
    assert set(diagnosis.versions) == {"python", "kp_dynamo", "torch", "torch_xla", "libtpu", "jax", "jaxlib"}
    assert diagnosis.settings["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"


def test_a_device_that_hangs_does_not_hang_doctor(self_test):
    self_test("import time; time.sleep(60)")
    ((name, message),) = failed(diagnose(timeout_s=0.5))
    assert name == "device"
    assert "nothing within 0.5 s" in message


def test_a_hanging_compilation_is_distinguished_from_a_hanging_device(self_test):
    self_test(WELL.splitlines()[0] + "\n" + WELL.splitlines()[1] + "\nimport time; time.sleep(60)")
    ((name, message),) = failed(diagnose(timeout_s=2))
    assert name == "self-test"
    assert "nothing more within 2 s" in message


def test_a_device_that_kills_its_process_is_named_by_the_signal(self_test):
    self_test("import os; os.kill(os.getpid(), 8)")
    assert failed(diagnose()) == [("device", "the XLA device does not start: its process was ended by SIGFPE")]


def test_a_device_that_raises_is_quoted(self_test):
    self_test("raise RuntimeError('no PJRT for FOO')")
    assert failed(diagnose()) == [("device", "the XLA device does not start: RuntimeError: no PJRT for FOO")]


def test_a_wrong_result_is_found(self_test):
    self_test(WELL.replace("1e-7", "0.5"))
    ((name, message),) = failed(diagnose())
    assert name == "self-test"
    assert message.endswith("differ from eager by 5.0e-01, allowed 1e-05")


def test_a_result_that_is_no_number_is_found(self_test):
    self_test(WELL.replace("1e-7", 'float("nan")'))
    assert [name for name, _ in failed(diagnose())] == ["self-test"]


def test_versions_that_do_not_fit_are_found_before_anything_starts(self_test, monkeypatch):
    def mismatched():
        raise TPUConfigurationError("torch 2.8.0 with torch_xla 2.9.0 are of different minor versions")

    self_test("raise AssertionError('not to be started')")
    monkeypatch.setattr(doctor, "check_versions", mismatched)
    assert failed(diagnose()) == [("versions", "torch 2.8.0 with torch_xla 2.9.0 are of different minor versions")]


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "there is no entry point of that name"), ("other:backend", "found instead: other:backend")],
)
def test_a_backend_that_is_not_registered_is_found(self_test, monkeypatch, value, message):
    self_test(WELL)
    entries = [] if value is None else [metadata.EntryPoint("kp_tpu", value, "torch_dynamo_backends")]
    monkeypatch.setattr(metadata, "entry_points", lambda **_: entries)
    ((name, found),) = failed(diagnose())
    assert name == "registration"
    assert message in found


def test_doctor_imports_neither_torch_nor_torch_xla():
    program = "import sys, kp_dynamo.cli.doctor; print(sorted({'torch', 'torch_xla'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_text_and_json_hold_the_same():
    checks = (Check("versions", "ok", "fit"), Check("device", "failed", "gone"))
    diagnosis = Diagnosis({"python": "3.11.7", "jax": ""}, {"PJRT_DEVICE": "CPU"}, checks, KNOWN_LIMITS[:1])
    assert str(diagnosis).splitlines() == [
        "versions: python 3.11.7, jax not installed",
        "settings: PJRT_DEVICE=CPU",
        "ok     versions: fit",
        "failed device: gone",
        "known limits:",
        f"  {KNOWN_LIMITS[0].what}",
        f"    {KNOWN_LIMITS[0].cure}",
    ]
    read = json.loads(json.dumps(diagnosis.to_dict()))
    assert read["is_healthy"] is False
    assert read["checks"][1] == {"name": "device", "status": "failed", "message": "gone"}
    assert read["known_limits"] == [{"what": KNOWN_LIMITS[0].what, "cure": KNOWN_LIMITS[0].cure}]
