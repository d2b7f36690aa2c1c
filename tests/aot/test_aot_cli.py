"""`python -m kp_dynamo aot`: what it prints and writes, and what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kp_dynamo.aot.report import AotReport
from kp_dynamo.cli.main import BAD_USAGE, FAILED, OK, main

MODELS = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), (torch.ones(8, 64),)

def larger():
    return torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU()), (torch.ones(8, 64),)

def broken():
    raise RuntimeError("cannot be made")
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "aot_models.py").write_text(MODELS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "aot_models.py"
    sys.modules.pop("aot_models", None)


def test_a_report_is_printed_and_written(models, tmp_path, capsys):
    files = tmp_path / "a.json", tmp_path / "a.html"
    assert main(["aot", f"{models}:make", "--train", "--json", str(files[0]), "--html", str(files[1])]) == OK
    text = capsys.readouterr().out
    assert text.startswith("training step on one v5e through kp_tpu, default options\n")
    report = AotReport.from_dict(json.loads(files[0].read_text()))
    assert [p.name for p in report.programs] == ["1.forward", "1.backward"]
    assert "<svg" in files[1].read_text()


def test_two_reports_are_compared(models, tmp_path, capsys):
    small, large = str(tmp_path / "small.json"), str(tmp_path / "large.json")
    assert main(["aot", f"{models}:make", "--json", small]) == OK
    assert main(["aot", f"{models}:larger", "--json", large]) == OK
    capsys.readouterr()
    assert main(["aot", "--diff", small, large]) == FAILED
    assert "worse past 1.02x: modelled_ms" in capsys.readouterr().out
    assert main(["aot", "--diff", large, small]) == OK
    assert main(["aot", "--diff", small, large, "--threshold", "1000"]) == OK


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        ([], "give either SPEC", BAD_USAGE),
        (["models.py:make", "--diff", "a", "b"], "give either SPEC", BAD_USAGE),
        (["--diff", "none.json", "none.json"], "none.json cannot be read as JSON", BAD_USAGE),
        (["--diff", "a", "b", "--verbose"], "--verbose is invalid with --diff", BAD_USAGE),
        (["{models}:make", "--chips", "4,16", "--verbose"], "--verbose is invalid with several numbers", BAD_USAGE),
        (["--diff", "a", "b", "--chips", "4"], "--chips is invalid with --diff", BAD_USAGE),
        (["--diff", "a", "b", "--options", "{{}}"], "--options is invalid with --diff", BAD_USAGE),
        (["--diff", "a", "b", "--target", "v6e"], "--target is invalid with --diff", BAD_USAGE),
        (["{models}:make", "--threshold", "1.1"], "--threshold is invalid without --diff", BAD_USAGE),
        (["{models}:make", "--chips", "1", "--sharding", "fdsp"], "sharding='fdsp' is invalid", BAD_USAGE),
        (["{models}:make", "--mesh", "data=4"], "mesh=data=4 needs chips", BAD_USAGE),
        (["{models}:make", "--chips", "4", "--mesh", "data"], "mesh='data' is invalid", BAD_USAGE),
        (["none.py:make"], "there is no file 'none.py'", BAD_USAGE),
        (["{models}:none"], "has no callable 'none'", BAD_USAGE),
        (["{models}:broken"], "raised RuntimeError: cannot be made", FAILED),
        (["{models}:make", "--target", "v3"], "target='v3' is unknown", BAD_USAGE),
        (["{models}:make", "--backend", "inductor"], "Allowed: kp_tpu, openxla", BAD_USAGE),
        (["{models}:make", "--timeout", "0.001"], "longer than the time it was given", FAILED),
        (["{models}:make", "--json", "/no/such/folder/a.json"], "cannot be written", BAD_USAGE),
    ],
)
def test_bad_usage_is_one_line_and_a_code(models, capsys, argv, message, code):
    assert main(["aot", *(a.format(models=models) for a in argv)]) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.slow
def test_several_processes_at_once_and_no_noise(models):
    command = [sys.executable, "-m", "kp_dynamo", "aot", f"{models}:make"]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == OK, err
        assert out.startswith("inference on one v5e")
        assert [line for line in err.splitlines() if "tpu" in line.lower()] == []
