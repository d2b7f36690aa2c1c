"""TORCH_TRACE and the profiler: reports and stages of compiling, read back from the files that torch writes."""

import hashlib
import json
import logging
from collections import defaultdict

import pytest

import kp_dynamo
from kp_dynamo.passes.base import PassReport
from kp_dynamo.runtime.event_log import log_event
from kp_dynamo.runtime.events import CaptureReady, GraphTransformed
from tests.spine import run_script

PROGRAM = """
import torch, kp_dynamo
def f(x, y): return torch.special.erfcx(y) @ x
x, y = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
torch.compile(f, backend="kp_tpu")(x, y).sum().backward()
torch._dynamo.reset()
torch.compile(f, backend="kp_tpu")(x, y)
print(kp_dynamo.explain(f, x, y).text(verbose=True))
"""


def records(text):
    """The records of a trace file, each with its payload, as torch's documentation of TORCH_TRACE describes them."""
    found = []
    for line in text.splitlines():
        if line.startswith("V") and "{" in line:
            found.append((json.loads(line[line.index("{") :]), []))
        elif line.startswith("\t"):
            found[-1][1].append(line[1:])
    return [(record, "\n".join(payload)) for record, payload in found]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The text that `explain` printed, and the records of the trace."""
    folder = tmp_path_factory.mktemp("trace")
    printed = run_script(PROGRAM, {"TORCH_TRACE": str(folder)}, timeout_s=600)
    (file,) = folder.iterdir()
    return printed, records(file.read_text())


def artifacts(traced):
    return {r["artifact"]["name"]: (r, payload) for r, payload in traced[1] if "artifact" in r}


def test_every_payload_is_whole(traced):
    for record, payload in traced[1]:
        if "has_payload" in record:
            assert hashlib.md5(payload.encode()).hexdigest() == record["has_payload"]


def test_the_report_of_explain_is_an_artifact(traced):
    report, payload = artifacts(traced)["kp_tpu_explain_report"]
    assert report["artifact"]["encoding"] == "string"
    assert payload.strip() == traced[0].strip()
    values, payload = artifacts(traced)["kp_tpu_explain_values"]
    assert values["artifact"]["encoding"] == "json"
    assert {"graphs", "passes", "seconds", "captures"} <= set(json.loads(payload))


def test_what_happened_to_each_graph_belongs_to_its_compilation(traced):
    found = artifacts(traced)
    for name in ("kp_tpu_1.joint.passes", "kp_tpu_1.forward.program", "kp_tpu_1.backward.program", "kp_tpu_1.capture"):
        record, payload = found[name]
        assert (record["frame_id"], record["frame_compile_id"]) == (0, 0)
        assert json.loads(payload)
    passes = json.loads(found["kp_tpu_1.joint.passes"][1])["passes"]
    assert {"cast_bf16", "fold_constants"} <= {report["name"] for report in passes}
    (on_cpu,) = json.loads(found["kp_tpu_1.forward.program"][1])["on_cpu"]
    assert on_cpu["op"] == "aten.special_erfcx.default"
    assert sorted(json.loads(found["kp_tpu_1.capture"][1])["inputs"]) == ["x", "y"]
    assert json.loads(found["kp_tpu_cached.capture"][1])["is_hit"]


def test_stages_are_nested_chrome_events(traced):
    events = [json.loads(payload) for record, payload in traced[1] if "chromium_event" in record]
    open_events, parents = [], defaultdict(set)
    for event in events:
        if event["ph"] == "B":
            parents[event["name"]] |= set(open_events)
            open_events.append(event["name"])
        elif event["ph"] == "E":
            assert open_events.pop() == event["name"]
    assert open_events == []
    assert "backend_compile" in parents["kp_tpu: passes of 1.joint"]
    assert "backend_compile" in parents["kp_tpu: compile 1.forward"]
    for name in ("kp_tpu: trace", "kp_tpu: xla"):
        assert {"backend_compile", "kp_tpu: compile 1.backward"} <= parents[name]
        assert "kp_tpu: compile a piece of a forward" in parents[name], "the pieces around erfcx, at their first run"


@pytest.fixture
def untraced(monkeypatch):
    for module in ("torch._logging._internal", "kp_dynamo.telemetry.stages"):
        monkeypatch.setattr(f"{module}.trace_log", logging.Logger("without handlers"))


class Unreadable:
    """A report that must not be asked for its text."""

    def text(self, verbose=False):
        raise AssertionError

    to_dict = text


def test_without_torch_trace_nothing_is_written_out(untraced, monkeypatch):
    monkeypatch.setattr(PassReport, "to_dict", Unreadable.text)
    kp_dynamo.telemetry.log.trace_report("explain", Unreadable())
    log_event(GraphTransformed("1.joint", (PassReport("cast_bf16", 0),), 0.1))
    log_event(CaptureReady(1, None, 0.1))
