"""What the forward decides of its values, such as which is the largest, the backward does not decide again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kp_dynamo import mark_sequence
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import op_name
from kp_dynamo.graph.saved_values import partitioned
from tests.graphs import trace_joint
from tests.spine import compiled

EXTREMES = {
    "largest": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "smallest": lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=-1),
    "amax": lambda x: x.abs().amax(-1) * x.sgn().mean(-1),
    "max": lambda x: x.max() * x.sin().sum(),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_extreme_of_a_product(name):
    """No element equalled the norm: the gradient was 0 times 1 / 0."""
    weight = torch.randn(6, 2)
    run = compiled(lambda x: EXTREMES[name](x @ weight.t()), precision="bfloat16", level="balanced", dynamic=True)
    for _ in range(4):
        x = torch.rand(8, 8, 2, requires_grad=True)
        run(x).sum().backward()
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0


def segments(x: Tensor) -> Tensor:
    """The largest of every third number."""
    groups = torch.arange(x.shape[-1]).remainder(3).expand(x.shape)
    return torch.zeros(*x.shape[:-1], 3).scatter_reduce(-1, groups, x, "amax", include_self=False)


OF_PADDED_ROWS = {
    "row": lambda x: x.amax(-1),
    "column": lambda x: x.amax(1, keepdim=True).sum(-1),
    "all": lambda x: x.max(),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1).sum(-1, keepdim=True),
    "segment": lambda x: segments(x).sum(-1),
}


@pytest.mark.quick("row", "all", "segment")
@pytest.mark.parametrize("name", OF_PADDED_ROWS)
def test_the_extreme_of_an_activation_of_padded_rows(name):
    """The same: a view with a size that varies, or the mask of the padding, hid it from the cure."""
    torch.manual_seed(0)
    weight = torch.randn(6, 4, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, weight))
        return OF_PADDED_ROWS[name](hidden) * hidden.sum(-1) + (hidden / (hidden.max().abs() + 1)).sum(-1)

    run = torch.compile(model, backend="kp_tpu", options={"level": "conservative", "buckets": [8, 24]})
    for length in (14, 15):
        x = mark_sequence(torch.rand(4, length, 4, requires_grad=True), 1)
        run(x).sum().backward()
        assert x.grad.isfinite().all()


# Each decides with numbers that are equal in every precision.
DECISIONS = {
    "equal": lambda x: x * (x == x.amax(-1, keepdim=True)),
    "at least": lambda x: x * (x >= x.topk(2).values[..., -1:]),
    "median": lambda x: x * (x == x.median(-1, keepdim=True).values),
    "difference": lambda x: x * ((x - x.amax(-1, keepdim=True)) == 0),
    "place": lambda x: x * F.one_hot(x.argmax(-1), 6),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_of_the_forward_is_saved(name):
    weight = torch.randn(6, 4, requires_grad=True)
    gm = trace_joint(lambda x, w: DECISIONS[name](F.gelu(x @ w.t())), torch.rand(8, 4), weight)
    forward, backward = partitioned(gm)
    saved = [n for n in forward.graph.output_node().all_input_nodes if not fake_of(n).is_floating_point()]
    assert len(saved) == 1
    assert not [n for n in backward.graph.nodes if op_name(n.target) in ("eq", "ge", "argmax", "median", "topk")]


@pytest.mark.quick("conservative-at least", "balanced-equal", "balanced-median", "aggressive-place")
@pytest.mark.parametrize("name", sorted({*DECISIONS} - {"difference"}))  # XLA:CPU computes the two values differently
@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_a_gradient_goes_where_the_value_came_from(name, level):
    torch.manual_seed(0)
    weight = torch.randn(6, 4, requires_grad=True)
    run = compiled(lambda x: DECISIONS[name](F.gelu(x @ weight.t())), precision="bfloat16", level=level)
    for _ in range(2):
        x = torch.rand(4, 14, 4, requires_grad=True)
        results = run(x)
        assert torch.autograd.grad(results.sum(), x)[0].abs().sum(-1).gt(0).all()
