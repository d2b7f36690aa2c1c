"""The trial at the first use of a folder on a TPU: when it runs, and that its result is kept."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from kp_dynamo.disk_cache import trial
from tests.cli.test_check_disk_cache import install_plugin


@pytest.fixture
def results(monkeypatch):
    """What the next trials find; each one takes one."""
    found: list[trial.Outcome] = []
    monkeypatch.setattr(trial, "try_in_two_processes", lambda timeout_s: found.pop())
    monkeypatch.delenv("KP_TPU_CACHE_TRIAL", raising=False)
    return found


@pytest.fixture
def libtpu(tmp_path):
    path = tmp_path / "libtpu.so"
    path.write_text("version 1")
    return path


def test_it_runs_once_for_a_folder_and_a_plugin(results, libtpu, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        results.append(trial.Outcome(True, "equal to the last bit"))
        for _ in range(2):
            assert trial.problem_at_first_use(folder, str(libtpu)) == ""
    libtpu.write_text("version 2, which is longer")
    with pytest.raises(IndexError):  # another trial begins
        trial.problem_at_first_use(folders[0], str(libtpu))


def test_a_failure_is_kept_until_its_file_is_deleted(results, libtpu, tmp_path):
    results.append(trial.Outcome(False, "other bits."))
    problem = trial.problem_at_first_use(tmp_path, str(libtpu))
    assert problem.startswith("other bits. Try: `python -m kp_dynamo doctor --cache`, or delete ")
    assert trial.problem_at_first_use(tmp_path, str(libtpu)) == problem
    (kept,) = tmp_path.glob(f"trial-{'[0-9a-f]' * 16}")
    assert str(kept) in problem
    kept.unlink()
    results.append(trial.Outcome(True, ""))
    assert trial.problem_at_first_use(tmp_path, str(libtpu)) == ""


def test_a_device_that_is_busy_for_once(results, libtpu, tmp_path):
    """The next process tries again."""
    results += [trial.Outcome(True, ""), trial.Outcome(False, "the first process stopped: it is in use.", False)]
    problem = trial.problem_at_first_use(tmp_path, str(libtpu))
    assert problem.startswith("the first process stopped: it is in use. Try: ")
    assert problem.endswith(", or start this process again.")
    assert trial.problem_at_first_use(tmp_path, str(libtpu)) == ""


def test_a_verdict_that_was_lost(results, libtpu, tmp_path):
    """The file is empty after a loss of power: that is not a success."""
    results += [trial.Outcome(False, "other bits."), trial.Outcome(True, "")]
    assert trial.problem_at_first_use(tmp_path, str(libtpu)) == ""
    (kept,) = tmp_path.glob(f"trial-{'[0-9a-f]' * 16}")
    kept.write_text("")
    assert trial.problem_at_first_use(tmp_path, str(libtpu)).startswith("other bits.")
    kept.write_bytes(b"\xff\xfe")  # damaged
    assert trial.problem_at_first_use(tmp_path, str(libtpu))


def test_a_folder_whose_name_is_no_text(results, libtpu, tmp_path, monkeypatch):
    monkeypatch.setattr(trial.logger, "disabled", True)  # pytest-xdist cannot send the captured line
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    results.append(trial.Outcome(False, "other bits."))
    for _ in range(2):
        assert trial.problem_at_first_use(folder, str(libtpu)).startswith("other bits.")


@pytest.mark.parametrize("stops", ["first", "second"])
def test_a_process_that_does_not_report(stops, monkeypatch):
    """It raises, crashes or hangs: another process may hold the device, so the next start tries again."""
    reports = [trial.SelfTest({"disk": {}}, "")] if stops == "second" else []
    reports.append(trial.SelfTest({}, "RuntimeError: The TPU is in use"))
    monkeypatch.setattr(trial, "run_self_test", lambda timeout_s, folder: reports.pop(0))
    expected = f"the {stops} process stopped: RuntimeError: The TPU is in use"
    assert trial.try_in_two_processes(60) == trial.Outcome(False, expected, is_lasting=False)


@pytest.mark.parametrize("stops", ["first", "second"])
def test_a_process_that_stops_at_what_it_loaded(stops, monkeypatch):
    """It would stop there at each start."""
    reports = [trial.SelfTest({"disk": {}}, "")] if stops == "second" else []
    reports.append(trial.SelfTest({"device": "xla:0"}, "it ended by SIGSEGV"))
    monkeypatch.setattr(trial, "run_self_test", lambda timeout_s, folder: reports.pop(0))
    assert trial.try_in_two_processes(60).is_lasting == (stops == "second")


@pytest.mark.parametrize(
    ("code", "timeout_s", "problem"),
    [("raise RuntimeError('The TPU is in use')", 60, "RuntimeError: The TPU is in use"),
     ("import time; time.sleep(60)", 0.5, "nothing within 0.5 s. Another process may hold the device")],
    ids=["it raises", "it hangs"],
)  # fmt: skip
def test_why_a_process_stops(code, timeout_s, problem, monkeypatch):
    monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", code))
    ran = trial.run_self_test(timeout_s)
    assert not ran.told
    assert ran.problem.startswith(problem)


def test_output_that_is_no_text(monkeypatch):
    code = """
import sys
sys.stdout.buffer.write(b'\\xff{}\\n{no json}\\n{"device": 1}\\n')
sys.stderr.buffer.write(b'\\xff')
"""
    monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", code))
    assert trial.run_self_test(60).told == {"device": 1}


def test_the_cache_of_the_user_stays_out_of_a_self_test(monkeypatch):
    monkeypatch.setenv("KP_TPU_CACHE_DIR", "/a/folder")
    code = "import os; print('{\"has\": %d}' % ('KP_TPU_CACHE_DIR' in os.environ))"
    monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", code))
    assert trial.run_self_test(60).told == {"has": 0}


def test_dump_flags_stay_out_of_a_self_test(monkeypatch):
    """With them, the cache loads nothing, and the trial would fail for good."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/a/folder --xla_cpu_enable_fast_math=true --xla_dump_hlo_as_text")
    code = "import json, os; print(json.dumps({'flags': os.environ['XLA_FLAGS']}))"
    monkeypatch.setattr(trial, "SELF_TEST", (sys.executable, "-c", code))
    assert trial.run_self_test(60).told == {"flags": "--xla_cpu_enable_fast_math=true"}


def test_a_folder_that_cannot_keep_the_result(results, libtpu, tmp_path):
    (tmp_path / "trial-lock").mkdir()
    problem = trial.problem_at_first_use(tmp_path, str(libtpu))
    assert problem == f"no trial could be made, or its result not kept in {tmp_path} (Is a directory)."


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks(results, libtpu, tmp_path, monkeypatch, reason):
    """The trial runs, and its result is kept."""

    def fail(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(trial.fcntl, "flock", fail)
    results.append(trial.Outcome(True, ""))
    for _ in range(2):
        assert trial.problem_at_first_use(tmp_path, str(libtpu)) == ""


def test_processes_that_start_together_run_one_trial(libtpu, tmp_path):
    ran = tmp_path / "ran"
    code = f"""
import time
from pathlib import Path
from kp_dynamo.disk_cache import trial
def run(timeout_s):
    with Path({str(ran)!r}).open("a") as file:
        file.write("once ")
    time.sleep(1)
    return trial.Outcome(True, "")
trial.try_in_two_processes = run
print(trial.problem_at_first_use(Path({str(tmp_path)!r}), {str(libtpu)!r}))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["\n"] * 3
    assert ran.read_text() == "once "


def test_the_processes_of_a_trial_begin_no_other(libtpu, tmp_path, monkeypatch):
    monkeypatch.setattr(
        trial, "SELF_TEST", (sys.executable, "-c", "import os; print(os.environ['KP_TPU_CACHE_TRIAL'])")
    )
    assert trial.run_self_test(60) == trial.SelfTest({}, "its process ended with 0")
    monkeypatch.setenv("KP_TPU_CACHE_TRIAL", "1")
    assert trial.problem_at_first_use(tmp_path, str(libtpu)) == ""
    assert not list(tmp_path.glob("trial-*"))


# The device of this process is taken for a TPU.
ENABLE = """
import os, sys
from kp_dynamo.compat import pjrt_plugins
import kp_dynamo
pjrt_plugins.is_tpu = lambda: True
kp_dynamo.enable_disk_cache(sys.argv[1])
import torch
assert (torch.ones(3, device="xla") + 1).sum().item() == 6
print(kp_dynamo.cache_stats()["disk"]["state"])
"""


@pytest.mark.slow
def test_a_device_on_which_it_works(tmp_path):
    environment = install_plugin(tmp_path)
    programs = tmp_path / "programs"
    for _ in range(2):
        command = [sys.executable, "-c", ENABLE, str(programs)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr[-3000:]
        (kept,) = programs.glob(f"trial-{'[0-9a-f]' * 16}")
        assert kept.read_text() == "works"
