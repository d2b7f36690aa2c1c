"""The batch of a divided model in Dynamo's graph: who reads it in parts, and where nobody may."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kp_dynamo.ops  # noqa: F401  # registers kp::shard_batch
from kp_dynamo.capture.divided_batch import divide_batch


def _mark(x):
    torch.ops.kp.shard_batch(x, [8])
    return x


def _readers(function, x=None):
    """What reads the divided batch, after the pass; None if the operator is gone."""
    found = []

    def backend(gm, inputs):
        divide_batch(gm)
        graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
        marks = [n for g in graphs for n in g.find_nodes(op="call_function", target=torch.ops.kp.shard_batch)]
        found.extend([user.name for user in mark.users] if mark.users else None for mark in marks)
        return gm.forward

    torch._dynamo.reset()
    x = torch.ones(8, 2) if x is None else x
    expected = function(x.clone())
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x.clone()), expected)
    return found


def test_what_follows_reads_the_parts():
    assert _readers(lambda x: (x + 1) * _mark(x).sin().sum()) == [["sin"]]


def test_a_tensor_that_was_written_before_the_call():
    x = torch.ones(8, 2)
    x.add_(1)
    assert _readers(lambda x: _mark(x).sin(), x) == [["sin"]]


def test_a_result_is_the_batch_itself():
    assert _readers(lambda x: (_mark(x.exp()), x.sin())) == []
    assert _readers(lambda x: (lambda y: (y.sin(), y))(_mark(x.exp()))) == [["sin"]]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _mark(x).add_(1).sin(),
        lambda x: _mark(x).sin() + x.view(-1)[:2].mul_(2),
        lambda x: _mark(x).sin() + x.data[0].zero_(),
        lambda x: _mark(x).sin() + torch.add(x.detach(), 1, out=x),
        lambda x: (_mark(x).sin(), x.view(-1)),
        lambda x: _mark(x).sin() + torch.vmap(lambda row: row.mul_(2))(x),
    ],
)
def test_a_batch_that_is_written_or_returned_as_a_view_is_left_alone(function):
    assert _readers(function) == []


@pytest.mark.parametrize("is_trained", [False, True])
def test_readers_after_the_grad_mode_has_changed(is_trained):
    """A copy that was made under `no_grad` passes no gradient on."""
    weight = torch.ones(2, requires_grad=is_trained)

    def function(x):
        h = x * weight
        with torch.no_grad():
            cos = _mark(h).cos()
        return (h.sin() - cos).sum()

    assert _readers(function) == [["cos"] if is_trained else ["cos", "sin"]]


def test_a_value_that_was_written_before_the_call():
    assert _readers(lambda x: _mark(x.exp().div_(255)).sin()) == [["sin"]]
    assert _readers(lambda x: _mark(x.exp().div_(255)).sin_().cos()) == []


def test_a_result_that_is_the_batch_and_another_that_is_a_view_of_it():
    assert _readers(lambda x: (lambda h: (h, _mark(h).view(-1)))(x * 2)) == []


def test_a_graph_of_inference_mode():
    with torch.inference_mode():
        assert _readers(lambda x: _mark(x).sin()) == [["sin"]]
        assert _readers(lambda x: _mark(x).add_(1).sin()) == []


def test_a_graph_with_a_transform():
    assert _readers(lambda x: _mark(x).sin() + torch.vmap(lambda row: row * x.shape[1])(x.cos())) == [["sin", "child"]]


def test_a_graph_inside_the_graph():
    assert _readers(lambda x: checkpoint(lambda x: _mark(x).sin(), x, use_reentrant=False)) == [["sin"]]
