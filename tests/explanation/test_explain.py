"""`explain`: each figure it gives is checked against a model made so that the figure is known."""

import json
import re
from dataclasses import dataclass

import pytest
import torch

import kp_dynamo
from kp_dynamo import TPUConfigurationError, cache_stats, clear_cache, explain
from kp_dynamo.explanation.graph_reports import PassOnGraph
from kp_dynamo.explanation.reports import Explanation
from kp_dynamo.passes.base import PassReport

FLOAT32 = {"precision": "float32"}
HERE = __file__


@pytest.fixture(autouse=True)
def _empty_cache():
    clear_cache()


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def line_of(function, offset):
    return f"{HERE}:{function.__code__.co_firstlineno + offset} in {function.__name__}"


def breaking(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def test_graph_breaks_carry_the_line_and_its_text():
    (graph_break,) = explain(breaking, torch.ones(3)).graph_breaks
    assert graph_break.line == line_of(breaking, 2)
    assert graph_break.source == "torch._dynamo.graph_break()"
    assert graph_break.reason.startswith("Call to `torch._dynamo.graph_break()`")


def breaking_twice(x):
    torch._dynamo.graph_break()
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def test_a_break_before_the_first_operator_and_one_in_a_resumed_function_are_seen():
    explanation = explain(breaking_twice, torch.ones(3))
    assert [b.line for b in explanation.graph_breaks] == [line_of(breaking_twice, 1), line_of(breaking_twice, 3)]
    assert len(explanation.captures) == 2


def test_no_graph_break_where_there_is_none():
    assert explain(torch.sin, torch.ones(3)).graph_breaks == ()


def test_forward_and_backward_are_graphs_of_one_capture():
    explanation = explain(mlp(), torch.randn(2, 8))
    (capture,) = explanation.captures
    assert [g.name for g in explanation.graphs] == [f"{capture.number}.forward", f"{capture.number}.backward"]
    assert explanation.num_programs == 2


def test_without_gradients_there_is_one_inference_graph():
    with torch.no_grad():
        explanation = explain(mlp(), torch.randn(2, 8))
    assert [g.name.split(".")[1] for g in explanation.graphs] == ["inference"]


def test_nothing_of_the_user_changes():
    model, x = torch.nn.Sequential(mlp(), torch.nn.Dropout(0.3)), torch.randn(2, 8, requires_grad=True)
    stats, state = cache_stats(), torch.get_rng_state()
    explain(model, x)
    assert cache_stats() == stats
    assert torch.equal(torch.get_rng_state(), state)
    assert [t.grad for t in (x, *model.parameters())] == [None] * 5


def test_a_model_that_the_user_compiled_is_a_hit():
    model, x = mlp(), torch.randn(2, 8)
    assert (explain(model, x).num_hits, explain(model, x).num_misses) == (0, 2)
    torch.compile(model, backend="kp_tpu")(x).sum().backward()
    explanation = explain(model, x)
    assert (explanation.num_hits, explanation.num_misses) == (2, 0)
    assert [c.is_hit for c in explanation.captures] == [True]


def test_a_miss_names_what_differs_from_the_nearest_entry():
    model = mlp()
    torch.compile(model, backend="kp_tpu")(torch.randn(2, 8))
    (capture,) = explain(model, torch.randn(3, 8)).captures
    assert re.search(r"input \d, dim 0: 2 -> 3", capture.why_missed)
    (capture,) = explain(model, torch.randn(2, 8), options={"level": "aggressive"}).captures
    assert "level='balanced' -> level='aggressive'" in capture.why_missed


def test_keys_name_what_is_compiled():
    model, x = mlp(), torch.randn(2, 8)
    keys = [[g.key for g in explain(model, x, options=o).graphs] for o in (None, None, {"level": "aggressive"})]
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])
    assert len(keys[0][0]) == 16


def equal_halves(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.sin()


def test_an_equal_capture_is_traced_once():
    first, second = explain(equal_halves, torch.ones(3)).captures
    assert (first.is_hit, second.is_hit, second.number) == (False, True, None)
    assert first.key == second.key


def test_a_compiled_model_is_explained_as_the_model():
    model, x = mlp(), torch.randn(2, 8)
    expected = [g.key for g in explain(model, x).graphs]
    assert [g.key for g in explain(torch.compile(model, backend="eager"), x).graphs] == expected
    assert len(explain(torch.compile(breaking, backend="eager"), torch.ones(3)).captures) == 2


def with_fallback(x):
    y = x * 2
    y = torch.special.erfcx(y)
    return y + 1


def test_an_operator_on_the_cpu_has_its_line_and_the_bytes_it_moved():
    explanation = explain(with_fallback, torch.ones(3, 5))
    (fallback,) = explanation.fallbacks
    assert fallback.op == "aten.special_erfcx.default"
    assert fallback.line == line_of(with_fallback, 2)
    assert fallback.moved_bytes == 2 * 3 * 5 * 4
    assert explanation.num_programs == 2
    assert explanation.seconds["xla"] > 0


def test_casts_are_counted_by_their_dtypes():
    def casting(x, y):
        return x.bfloat16().float(), y.bfloat16(), x.float()

    (graph,) = explain(casting, torch.ones(3), torch.ones(4), options=FLOAT32).graphs
    assert graph.casts == {"float32 -> bfloat16": 2, "bfloat16 -> float32": 1}


@dataclass(frozen=True)
class RefuseSines:
    name = "refuse_sines"

    def __call__(self, gm):
        sines = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default]
        return PassReport(self.name, 0, tuple((name, "sines stay") for name in sines))


def test_passes_say_what_they_rewrote_and_refused():
    explanation = explain(torch.sin, torch.ones(3), options={**FLOAT32, "extra_passes": [RefuseSines()]})
    (capture,) = explanation.captures
    done = explanation.passes[-1]
    refused = PassOnGraph(f"{capture.number}.inference", "refuse_sines", 0, (("sin", "sines stay"),), (), done.places)
    assert done == refused
    assert [place.module for place in done.places] == [""]


def test_seconds_are_those_of_this_run_by_stage():
    with torch.no_grad():
        explanation = explain(mlp(), torch.randn(2, 8))
    seconds = explanation.seconds
    assert list(seconds) == ["dynamo", "aot", "passes", "trace", "xla"]
    assert all(value > 0 for value in seconds.values())
    (capture,) = explanation.captures
    assert sum(seconds.values()) - seconds["dynamo"] == pytest.approx(capture.seconds)


def test_the_dictionary_is_json():
    explanation = explain(with_fallback, torch.ones(3))
    read = json.loads(json.dumps(explanation.to_dict()))
    assert read["totals"] == {"programs": 2, "hits": 0, "misses": 1}
    assert read["fallbacks"][0]["op"] == "aten.special_erfcx.default"
    assert set(read) == {
        "graph_breaks",
        "captures",
        "divisions",
        "passes",
        "graphs",
        "fallbacks",
        "seconds",
        "uncompiled",
        "whole",
        "disk",
        "versions",
        "subject",
        "totals",
    }


def test_keyword_arguments_reach_the_model():
    (graph,) = explain(torch.add, torch.ones(3), torch.ones(3), alpha=3).graphs
    assert graph.num_operators == 1


def test_bad_options_are_said_at_once():
    with pytest.raises(TPUConfigurationError, match="did you mean 'level'"):
        explain(mlp(), torch.randn(2, 8), options={"levle": "balanced"})


def test_after_a_model_that_raises_the_next_is_explained():
    def raising(x):
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        explain(raising, torch.ones(3))
    assert explain(torch.sin, torch.ones(3)).num_programs == 1


def test_the_index_names_the_function_and_not_a_module():
    assert callable(kp_dynamo.explain)
    assert kp_dynamo.Explanation is Explanation
