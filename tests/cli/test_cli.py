"""The command line: what it prints, and what it exits with."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kp_dynamo.cli import doctor
from kp_dynamo.cli import main as cli
from kp_dynamo.cli.doctor import Check, Diagnosis
from kp_dynamo.cli.main import BAD_USAGE, FAILED, OK, main
from kp_dynamo.cli.model_spec import load_spec

MODELS = """
import torch
from neighbour import WIDTH

class Model(torch.nn.Linear):
    def forward(self, x):
        result = super().forward(x)
        return torch.special.erfcx(result) if self.training else result

def make():
    return Model(WIDTH, 4), (torch.ones(2, WIDTH),)

def talking():
    print("made")
    return torch.sin, [torch.ones(3)]

def broken():
    raise RuntimeError("cannot be made")

def not_a_pair():
    return torch.ones(2)

def bare_tensor():
    return torch.sin, torch.ones(2)

def two_devices():
    import torch_xla
    return lambda a, b: (a + 1, b + 1), (torch.ones(2), torch.ones(2, device=torch_xla.device()))
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A file with SPECs, a module beside it, and both of them forgotten afterwards."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "models.py"
    for name in ("models", "neighbour"):
        sys.modules.pop(name, None)


def bad_usage(capsys, *argv):
    """The message of a command that argparse refuses."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == BAD_USAGE
    return capsys.readouterr().err


def test_explain_prints_text(models, capsys):
    assert main(["explain", f"{models}:make"]) == OK
    printed = capsys.readouterr().out
    assert re.search(r"^  \d+\.inference +\d+ +1 ", printed, re.MULTILINE)
    assert "operators on the CPU: none" in printed
    assert "that found nothing to do" in printed


def test_explain_prints_every_pass_on_request(models, capsys):
    assert main(["explain", f"{models}:make", "--verbose"]) == OK
    assert re.search(r"^  \d+\.inference +rewrite_attention +0 +0$", capsys.readouterr().out, re.MULTILINE)


def test_explain_prints_one_form(capsys):
    assert "not allowed with argument --json" in bad_usage(capsys, "explain", "a:b", "--json", "--verbose")


def test_explain_trains_on_request_and_prints_json(models, capsys):
    options = '{"precision": "float32", "level": "aggressive"}'
    assert main(["explain", f"{models}:make", "--train", "--json", "--options", options]) == OK
    explained = json.loads(capsys.readouterr().out)
    assert [g["name"].split(".")[1] for g in explained["graphs"]] == ["forward", "backward"]
    assert [f["op"] for f in explained["fallbacks"]] == ["aten.special_erfcx.default"]


def test_output_that_a_model_prints_is_separate(models, capsys):
    assert main(["explain", f"{models}:talking", "--json"]) == OK
    printed = capsys.readouterr()
    assert json.loads(printed.out)["totals"]["programs"] == 1
    assert "made\n" in printed.err


def test_a_bad_option_is_bad_usage(models, capsys):
    assert main(["explain", f"{models}:make", "--options", '{"levle": 1}']) == BAD_USAGE
    assert "did you mean 'level'" in capsys.readouterr().err


def test_what_the_backend_refuses_is_a_failure_with_its_message(models, capsys):
    assert main(["explain", f"{models}:two_devices"]) == FAILED
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: 1 graph inputs are on xla:0")


def test_a_spec_that_raises_is_one_line(models, capsys):
    assert main(["explain", f"{models}:broken"]) == FAILED
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(
        f"error: {models}:broken raised RuntimeError: cannot be made. It must return (model, args)"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("models.py", "SPEC is 'models.py'; allowed: module:callable"),
        (":make", "SPEC is ':make'"),
        ("models:two words", "SPEC is 'models:two words'"),
        ("nowhere.py:make", "there is no file 'nowhere.py'"),
        ("no.such.module:make", "there is no module 'no.such.module'"),
        ("{models}:missing", "has no callable 'missing'"),
        ("{models}:WIDTH", "has no callable 'WIDTH'"),
        ("{models}:not_a_pair", "returned Tensor; allowed: (model, args)"),
        ("{models}:bare_tensor", "returned (builtin_function_or_method, Tensor); allowed: (model, args)"),
    ],
)
def test_a_bad_spec_is_bad_usage(models, capsys, spec, message):
    assert main(["explain", spec.format(models=models)]) == BAD_USAGE
    assert message in capsys.readouterr().err


def test_a_spec_may_name_a_module(models, monkeypatch):
    monkeypatch.syspath_prepend(str(models.parent))
    model, (x,) = load_spec("models:make")
    assert model(x).shape == (2, 4)


def test_a_pass_that_is_off_by_default_is_named_in_the_options(models, capsys):
    options = '{"extra_passes": ["flash_attention"]}'
    assert main(["explain", f"{models}:make", "--json", "--options", options]) == OK
    explained = json.loads(capsys.readouterr().out)
    assert "flash_attention" in {p["name"] for p in explained["passes"]}


@pytest.mark.parametrize("name", ['"flash"', "1", "null", '["flash_attention"]'])
def test_no_other_pass_is_named_in_the_options(capsys, name):
    message = bad_usage(capsys, "explain", "a:b", "--options", f'{{"extra_passes": [{name}]}}')
    assert "Allowed on the command line: 'flash_attention'" in message


@pytest.mark.parametrize(("options", "message"), [("[1", "is not JSON"), ("[1]", "is not a JSON object")])
def test_options_must_be_a_json_object(capsys, options, message):
    assert message in bad_usage(capsys, "explain", "a:b", "--options", options)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "soon"])
def test_a_limit_is_a_number_above_0(capsys, value):
    assert f"'{value}' is no ratio > 0" in bad_usage(capsys, "aot", "--diff", "a", "b", f"--threshold={value}")
    assert f"'{value}' is no number of seconds > 0" in bad_usage(capsys, "doctor", f"--timeout={value}")


def test_usage_is_shown_for_what_is_not_known(capsys):
    assert "COMMAND" in bad_usage(capsys)
    assert "invalid choice: 'cure'" in bad_usage(capsys, "cure")
    assert "unrecognized arguments: --fast" in bad_usage(capsys, "doctor", "--fast")


@pytest.mark.parametrize(("status", "code"), [("ok", OK), ("failed", FAILED)])
def test_doctor_exits_with_its_result(monkeypatch, capsys, status, code):
    diagnosis = Diagnosis({}, {}, (Check("device", status, "as it is"),), ())
    asked = []
    monkeypatch.setattr(doctor, "diagnose", lambda s, disk_cache: asked.append((s, disk_cache)) or diagnosis)
    assert main(["doctor"]) == code
    assert "device: as it is" in capsys.readouterr().out
    assert main(["doctor", "--json", "--timeout", "7", "--cache"]) == code
    assert json.loads(capsys.readouterr().out)["checks"][0]["status"] == status
    assert asked == [(300.0, False), (7.0, True)]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A repository with a benchmark that shows its arguments and exits with 3."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()  # a namespace package would lose to the real one on PYTHONPATH
    (tmp_path / "bench" / "__main__.py").write_text("import sys; print(sys.argv[1:], flush=True); sys.exit(3)")
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("rest", [[], ["--help"], ["per_call", "--repeats", "5", "--json"]])
def test_bench_hands_everything_on(bench, capfd, rest):
    assert main(["bench", *rest]) == 3
    assert capfd.readouterr().out == f"{rest}\n"


def test_bench_without_a_repository_says_where_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    assert main(["bench"]) == BAD_USAGE
    assert "not part of the installed package" in capsys.readouterr().err


def test_the_module_runs_the_command_line():
    done = subprocess.run([sys.executable, "-m", "kp_dynamo", "cure"], capture_output=True, text=True, check=False)
    assert done.returncode == BAD_USAGE
    assert done.stderr.startswith("usage: python -m kp_dynamo ")


def test_the_repository_is_found():
    assert Path(__file__).resolve().parents[2] == cli.REPOSITORY
