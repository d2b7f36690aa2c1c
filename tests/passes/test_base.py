import pytest
import torch

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls
from kp_dynamo.passes import PASSES
from kp_dynamo.passes.base import PassReport, Refusal, reported, rewrite_each
from kp_dynamo.pipeline.build import build_pipeline
from tests.graphs import trace_inference

aten = torch.ops.aten


def _three_nodes():
    graph = trace_inference(lambda x: x.sin().cos().exp(), torch.ones(2)).graph
    return list(calls(graph, aten.sin.default, aten.cos.default, aten.exp.default))


def test_refusals_are_reported_by_name():
    sine, *_ = _three_nodes()
    assert reported([Refusal(sine, "sines stay")]) == ((sine.name, "sines stay"),)


def test_matches_are_rewritten_refusals_reported_and_others_left_alone():
    sine, cosine, exp = _three_nodes()
    found = {sine: "sine", cosine: Refusal(cosine, "cosines stay"), exp: None}
    rewritten = []
    report = rewrite_each("p", found, found.__getitem__, rewritten.append)
    assert rewritten == ["sine"]
    assert report == PassReport("p", 1, (("cos", "cosines stay"),))


def test_a_node_is_matched_after_the_rewrites_before_it():
    nodes, log = _three_nodes(), []

    def match(node):
        log.append(f"match {node.name}")
        return node.name

    rewrite_each("p", nodes, match, lambda name: log.append(f"rewrite {name}"))
    assert log[:3] == ["match sin", "rewrite sin", "match cos"]


@pytest.mark.parametrize("checkpoint", ["off", "attention", "blocks", "auto", 0.5])
def test_the_list_of_passes_is_in_running_order(checkpoint):
    positions = {cls.name: number for number, cls in enumerate(PASSES)}
    pipeline = build_pipeline(CompileOptions(level="aggressive", checkpoint=checkpoint), lengths=("s0",))
    found = [positions[p.name] for p in pipeline]
    assert found == sorted(found)
    assert len(found) > 10
