"""`prometheus_text`: read back by the parser of prometheus_client, and every counter of the package is in it."""

import re
from pathlib import Path

import pytest
import torch

import kp_dynamo
from kp_dynamo.telemetry import TELEMETRY, prometheus_text, snapshot
from kp_dynamo.telemetry.prometheus import COUNTERS
from tests.spine import compiled

parser = pytest.importorskip("prometheus_client.parser")


def read():
    """All samples, by name and labels."""
    families = list(parser.text_string_to_metric_families(prometheus_text()))
    assert all(family.type == "counter" for family in families)
    assert all(family.documentation for family in families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.fixture
def fresh():
    TELEMETRY.reset()
    yield
    TELEMETRY.reset()


def test_before_anything_ran_every_counter_is_zero(fresh):
    assert read() == {(f"kp_tpu_{name}_total",): 0 for name in COUNTERS}


def test_values_are_those_of_the_snapshot(fresh):
    kp_dynamo.clear_cache()
    compiled(lambda x: torch.special.erfcx(x * 2) @ x, precision="bfloat16")(torch.ones(3, 3))
    samples, counted = read(), snapshot()
    for name in ("captures", "graphs", "programs", "aot_traces", "fallback_bytes"):
        assert samples[f"kp_tpu_{name}_total",] == counted[name] > 0
    ((op, count),) = counted["fallbacks"].items()
    assert "erfcx" in op
    assert samples["kp_tpu_fallbacks_total", op] == count == 1
    assert samples["kp_tpu_compile_seconds_total", "xla"] == pytest.approx(counted["seconds"]["xla"], abs=1e-6)
    assert samples["kp_tpu_pass_rewrites_total", "cast_bf16"] >= 1
    assert samples["kp_tpu_pass_refusals_total", "cast_bf16"] >= 0


@pytest.mark.parametrize("op", ['a "b"', "a\\b", "a\nb", "a\\nb", '\\"', "x{y=1} 2", "a,b", "ünïcode", ""])
def test_labels_survive(fresh, op):
    TELEMETRY.count_fallback(op, 1)
    TELEMETRY.count_fallback("last", 1)
    samples = read()
    assert samples["kp_tpu_fallbacks_total", op] == samples["kp_tpu_fallbacks_total", "last"] == 1


def test_a_pass_of_the_user_with_a_strange_name_is_a_label(fresh):
    TELEMETRY.passed("1.joint", {"name": 'my "pass"', "rewritten": 2, "refused": [("mm", "no")]})
    TELEMETRY.passed("2.joint", {"name": 'my "pass"', "rewritten": 3, "refused": []})
    samples = read()
    assert samples["kp_tpu_pass_rewrites_total", 'my "pass"'] == 5
    assert samples["kp_tpu_pass_refusals_total", 'my "pass"'] == 1


def test_every_counter_of_the_package_is_there():
    sources = Path(kp_dynamo.__file__).parent.rglob("*.py")
    used = {name for path in sources for name in re.findall(r'TELEMETRY\.count\(\s*"(\w+)"', path.read_text())}
    assert "programs" in used
    assert used <= set(COUNTERS)


def test_it_ends_with_a_newline_and_has_no_empty_line():
    text = prometheus_text()
    assert text.endswith("\n")
    assert "\n\n" not in text
