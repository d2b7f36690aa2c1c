"""A command with a hard limit: its exit code, or all of it killed."""

import os
import sys
import time

import pytest

from kp_dynamo import XLACompilationTimeoutError
from kp_dynamo.cli.limited_process import run_limited
from kp_dynamo.cli.main import FAILED, OK, main

MODEL = """
import torch, time
def make():
    time.sleep({seconds})
    return torch.nn.Linear(8, 8), (torch.ones(2, 8),)
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_of_a_command_in_time(code):
    assert run_limited([sys.executable, "-c", f"raise SystemExit({code})"], 60) == code


def is_alive(pid):
    """A zombie, whose parent has not asked for it, is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_late_command_is_killed_with_its_children(tmp_path):
    """The child of the child ignores what can be ignored, and would write its last word."""
    told = tmp_path / "pid"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    parent = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(told)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    start = time.monotonic()
    with pytest.raises(XLACompilationTimeoutError, match="longer than the time it was given, 3 s, and was stopped"):
        run_limited([sys.executable, "-c", parent], 3)
    assert time.monotonic() - start < 30
    pid = int(told.read_text())
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_an_interrupted_wait_leaves_nothing(monkeypatch, tmp_path):
    import subprocess

    started = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout=None):
            started.append(self.pid)
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_limited([sys.executable, "-c", "import time; time.sleep(60)"], 60)
    assert not is_alive(started[0])


@pytest.mark.parametrize("command", [pytest.param("aot", marks=pytest.mark.slow), "explain"])
def test_the_command_line_is_stopped_while_the_model_is_made(tmp_path, capfd, command):
    """No limit in the process itself could: nothing of ours runs then."""
    model = tmp_path / "model.py"
    model.write_text(MODEL.format(seconds=600))
    start = time.monotonic()
    assert main([command, f"{model}:make", "--timeout", "4"]) == FAILED
    assert time.monotonic() - start < 60
    assert "error: it took longer than the time it was given, 4 s, and was stopped" in capfd.readouterr().err


@pytest.mark.slow
def test_the_command_line_in_time_says_what_it_would_without(tmp_path, capfd):
    model = tmp_path / "model.py"
    model.write_text(MODEL.format(seconds=0))
    environment = dict(os.environ)
    assert main(["explain", f"{model}:make", "--timeout", "300", "--json"]) == OK
    assert '"programs": 1' in capfd.readouterr().out
    assert dict(os.environ) == environment


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan"])
def test_a_limit_that_is_none_is_bad_usage(seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["aot", "model.py:make", f"--timeout={seconds}"])
    assert ended.value.code == 2
    assert "is no number of seconds > 0" in capsys.readouterr().err
