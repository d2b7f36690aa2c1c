"""Logs: quiet by default, text by TORCH_LOGS, JSON by KP_TPU_LOG, graphs for tlparse by TORCH_TRACE."""

import io
import json
import logging
import os
import runpy
import subprocess
import sys

import pytest
import torch

import kp_dynamo
from kp_dynamo import TPUConfig, TPUConfigurationError, XLACompiler, clear_cache, validate_tpu_model
from kp_dynamo.passes.base import PassReport
from kp_dynamo.runtime.event_log import log_event
from kp_dynamo.runtime.events import CaptureReady, GraphTransformed
from kp_dynamo.telemetry import log


@pytest.fixture
def root(monkeypatch):
    """The logger of the package, as if nothing had been configured; left as it was found."""
    logger = log.ROOT
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers
    logger.handlers = []
    logger.setLevel(logging.NOTSET)
    monkeypatch.delenv("KP_TPU_LOG", raising=False)
    yield logger
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def json_stream(root, monkeypatch):
    monkeypatch.setenv("KP_TPU_LOG", "json")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log.configure()
    return sys.stderr


def test_without_settings_nothing_is_configured(root):
    log.configure()
    assert (root.level, root.propagate, root.handlers) == (logging.NOTSET, True, [])


def test_json_has_the_message_and_every_extra_field(json_stream):
    logging.getLogger("kp_dynamo.some.room").warning("lost %d", 3, extra={"graph": "1.joint", "kept": (1, 2)})
    (line,) = json_stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "WARNING",
        "logger": "kp_dynamo.some.room",
        "message": "lost 3",
        "graph": "1.joint",
        "kept": [1, 2],
    }


@pytest.mark.parametrize(("value", "num_handlers"), [("json", 1), ("yaml", 0)])
def test_the_import_of_the_package_configures_json(value, num_handlers, root, monkeypatch):
    monkeypatch.setenv("KP_TPU_LOG", value)
    runpy.run_path(kp_dynamo.__file__)
    assert len(root.handlers) == num_handlers


def test_json_holds_an_exception_in_its_one_line(json_stream):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("kp_dynamo.room").exception("it failed")
    (line,) = json_stream.getvalue().splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_json_logs_accept_values_that_json_cannot_represent(json_stream):
    logging.getLogger("kp_dynamo.room").warning("odd", extra={"dtype": torch.bfloat16})
    assert json.loads(json_stream.getvalue())["dtype"] == "torch.bfloat16"


def test_json_starts_at_info_and_is_written_once(json_stream):
    log.configure()
    logging.getLogger("kp_dynamo.room").debug("small")
    logging.getLogger("kp_dynamo.room").info("large")
    assert [json.loads(line)["message"] for line in json_stream.getvalue().splitlines()] == ["large"]


def test_json_keeps_a_level_that_was_chosen(root, monkeypatch):
    monkeypatch.setenv("KP_TPU_LOG", "json")
    root.setLevel(logging.ERROR)
    log.configure()
    assert root.level == logging.ERROR


def test_a_handler_of_the_users_stays_as_it_is(root, monkeypatch):
    handler = logging.StreamHandler(io.StringIO())
    root.addHandler(handler)
    log.configure()
    assert root.propagate
    monkeypatch.setenv("KP_TPU_LOG", "json")
    log.configure()
    assert handler.formatter is None
    assert len(root.handlers) == 2


def test_another_format_is_refused_with_what_is_allowed(monkeypatch):
    monkeypatch.setenv("KP_TPU_LOG", "yaml")
    with pytest.raises(TPUConfigurationError, match=r"KP_TPU_LOG='yaml'.*Allowed: json"):
        log.configure()


def test_a_compilation_refuses_it_too(monkeypatch):
    monkeypatch.setenv("KP_TPU_LOG", "yaml")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(torch.sin, backend="kp_tpu")(torch.ones(3))
    assert isinstance(caught.value.inner_exception, TPUConfigurationError)


def messages(caplog):
    """The records of the package; at DEBUG, torch's structured trace is logged as well."""
    return [record for record in caplog.records if record.name.startswith("kp_dynamo.")]


def test_passes_are_logged_with_fields(caplog):
    report = PassReport("cast_bf16", 2, (("exp", "it is sensitive"),))
    with caplog.at_level(logging.DEBUG, "kp_dynamo"):
        log_event(GraphTransformed("1.joint", (report,), 0.5))
    (record,) = messages(caplog)
    assert record.getMessage() == "1.joint: cast_bf16 rewrote 2, refused (('exp', 'it is sensitive'),)"
    assert (record.event, record.graph, record.rewritten) == ("pass", "1.joint", 2)


def test_captures_are_logged_as_found_or_traced(caplog):
    with caplog.at_level(logging.DEBUG, "kp_dynamo"):
        log_event(CaptureReady(None, None, 0.0))
        log_event(CaptureReady(4, None, 1.0))
    assert [r.is_hit for r in messages(caplog)] == [True, False]


PROGRAM = """
import os, sys, torch
def f(x): return torch.special.erfcx(x * 2) + 1
torch.compile(f, backend="kp_tpu")(torch.ones(3))
print("then", file=sys.stderr)
os.environ["KP_TPU_LOG"] = "json"
torch.compile(f, backend="kp_tpu")(torch.ones(4))
"""


def run(**environment):
    environment = {"PJRT_DEVICE": "CPU", **environment}
    kept = {
        name: value for name, value in os.environ.items() if name not in ("TORCH_LOGS", "KP_TPU_LOG", "TORCH_TRACE")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_only_the_warning_is_seen_by_default_and_json_from_when_it_is_asked_for():
    before, _, after = run().partition("then\n")
    (warning,) = [line for line in before.splitlines() if "kp_dynamo" in line]
    assert "special_erfcx" in warning
    assert "runs on the CPU" in warning
    messages = [json.loads(line) for line in after.splitlines()]
    assert "program" in [m.get("event") for m in messages]
    assert all(m["logger"].startswith("kp_dynamo.") for m in messages)


def test_torch_logs_writes_text_once_and_torch_trace_gets_the_graphs(tmp_path):
    before, _, after = run(TORCH_LOGS="+kp_dynamo", TORCH_TRACE=str(tmp_path)).partition("then\n")
    assert len([line for line in before.splitlines() if "1.inference: XLA programs: 2" in line]) == 1
    assert len([line for line in before.splitlines() if "capture 1 took" in line]) == 1
    assert all(json.loads(line)["logger"].startswith("kp_dynamo.") for line in after.splitlines())
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    for name in ("kp_tpu_1.inference.before_passes", "kp_tpu_1.inference.after_passes"):
        assert f'"name": "{name}", "encoding": "string"' in text
    assert "torch.ops.aten.special_erfcx.default" in text


def test_the_object_api_prints_nothing_and_logs_json_on_request(json_stream, capfd):
    clear_cache()
    with torch.no_grad():
        XLACompiler(TPUConfig()).compile_model(torch.nn.Linear(4, 4), torch.ones(2, 4))
    validate_tpu_model(torch.nn.Linear(4, 4), TPUConfig())
    assert capfd.readouterr().out == ""
    lines = [json.loads(line) for line in json_stream.getvalue().splitlines()]
    assert any(line["logger"] == "kp_dynamo.runtime.event_log" for line in lines)
