"""How the results of a graph lie on a mesh, from how its inputs lie."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kp_dynamo.graph.placements import result_placements
from kp_dynamo.sharding.mesh import NamedMesh

aten = torch.ops.aten
MESH = NamedMesh.of({"data": 4, "model": 2})
B, S, D, F = 8, 16, 32, 64


def placement(function, shapes, given):
    inputs = [torch.empty(shape, dtype=torch.long if shape == (B, S) else torch.float32) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    [found] = result_placements(graph, given, MESH)
    return found


# Function, shapes of its inputs, their placements, placement of its result.
CASES = {
    "elementwise": (lambda x: [torch.relu(x)], [(B, S, D)], [("data",)], ("data", None, None)),
    "residual": (lambda x, b: [b + x], [(B, S, D), (D,)], [("data",), ("data",)], ("data", None, None)),
    "column": (aten.mm, [(B, D), (D, F)], [("data",), (None, "model")], ("data", "model")),
    "row": (aten.mm, [(B, F), (F, D)], [("data", "model"), ("model",)], ("data", None)),
    "fsdp weight": (lambda x, w: [x @ w.t()], [(B, D), (F, D)], [("data",), ("data",)], ("data", None)),
    "gradient of a weight": (lambda g, x: [g.t() @ x], [(B, F), (B, D)], [("data",), ("data",)], (None, None)),
    "batched": (
        aten.bmm, [(B, S, D), (B, D, F)], [("data",), ("data", None, "model")], ("data", None, "model")
    ),
    "flattened": (lambda x: [x.view(B * S, D)], [(B, S, D)], [("data",)], ("data", None)),
    "heads": (
        lambda x: [x.view(B, S, 8, 4).transpose(1, 2)], [(B, S, D)], [("data", None, "model")],
        ("data", "model", None, None),
    ),
    "joined heads": (
        lambda x: [x.permute(0, 2, 1, 3).reshape(B, S, D)], [(B, 8, S, 4)], [("data", "model")],
        ("data", None, "model"),
    ),
    "inner part of a joined dimension": (lambda x: [x.view(B * S, D)], [(B, S, D)], [(None, "data")], (None, None)),
    "unsqueezed": (lambda x: [x.unsqueeze(0)], [(B, D)], [("data",)], (None, "data", None)),
    "squeezed": (lambda x: [x.squeeze(1)], [(B, 1, D)], [("data",)], ("data", None)),
    "expanded": (lambda x: [x.expand(B, S, D)], [(B, 1, D)], [("data",)], ("data", None, None)),
    "sum": (lambda x: [x.sum(1)], [(B, S, D)], [("data", None, "model")], ("data", "model")),
    "sum of all": (lambda x: [x.sum()], [(B, S, D)], [("data",)], ()),
    "kept sum": (lambda x: [x.sum(-1, keepdim=True)], [(B, S, D)], [("data",)], ("data", None, None)),
    "softmax": (lambda x: [x.softmax(-1)], [(B, S, D)], [("data",)], ("data", None, None)),
    "embedding": (
        lambda w, i: [aten.embedding(w, i)], [(F, D), (B, S)], [("model", None), ("data",)], ("data", None, None)
    ),
    "slice": (lambda x: [x[:, :, : D // 2]], [(B, S, D)], [("data", None, "model")], ("data", None, None)),
    "cat": (lambda x, y: [torch.cat([x, y], 1)], [(B, S, D)] * 2, [("data",)] * 2, ("data", None, None)),
    "one of several results": (
        lambda x: [aten.native_layer_norm(x, [D], None, None, 1e-5)[1]], [(B, S, D)], [("data",)],
        ("data", None, None),
    ),
    "split": (lambda x: [x.split(S // 2, 1)[1]], [(B, S, D)], [("data",)], ("data", None, None)),
    "does not divide": (lambda x: [x[:6]], [(B, D)], [("data",)], (None, None)),
    "from nothing": (lambda x: [torch.ones(B, D)], [(B, D)], [("data",)], (None, None)),
    "an axis once": (lambda x: [x + x.t()], [(B, B)], [("data",)], ("data", None)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_result_lies_as_its_inputs_say(case):
    function, shapes, given, expected = CASES[case]
    as_list = function if not isinstance(function, torch._ops.OpOverloadPacket) else lambda *args: [function(*args)]
    assert placement(as_list, shapes, given) == expected


def test_two_axes_may_divide_one_dimension():
    both = ("data", "model")
    assert placement(lambda x: [x.view(B * S, D)], [(B, S, D)], [(both,)]) == (both, None)


def test_a_result_that_is_no_tensor_has_no_placement():
    graph = make_fx(lambda x: [x, None], tracing_mode="fake")(torch.empty(B, D)).graph
    assert result_placements(graph, [("data",)], MESH) == [("data", None), ()]
