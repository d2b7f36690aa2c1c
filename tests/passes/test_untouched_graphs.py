"""A pass of ours that reports no place leaves the graph as it was: what checks and recompiles graphs counts on that."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.pipeline import build_pipeline
from tests.graphs import graph_text, trace_inference, trace_joint


def mlp(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w)) @ w


def attention(x: Tensor, w: Tensor) -> Tensor:
    heads = F.linear(x, w).unflatten(-1, (2, -1)).transpose(-2, -3)
    return ((heads @ heads.mT).softmax(-1) @ heads).flatten(0, 1)


def softmax_of_queries(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).softmax(0).t() @ x


def elementwise(x: Tensor, w: Tensor) -> Tensor:
    return (x + 1).sin() * w.sum()


@pytest.mark.quick("aggressive", "attention-trace_inference-conservative", "mlp-trace_joint-balanced")
@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
@pytest.mark.parametrize("fn", [mlp, attention, softmax_of_queries, elementwise])
def test_no_place_is_no_change(fn: Callable[..., Tensor], trace: Callable, level: str):
    gm = trace(fn, *(torch.randn(8, 8, requires_grad=True) for _ in range(2)), decompositions=decompositions())
    untouched = 0
    for graph_pass in build_pipeline(CompileOptions.from_dict({"level": level})):
        before = graph_text(gm)
        if graph_pass(gm).rewritten == 0:
            assert graph_text(gm) == before, graph_pass.name
            untouched += 1
    assert untouched
