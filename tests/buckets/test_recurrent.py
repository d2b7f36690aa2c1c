"""Recurrent layers at padded lengths: steps of padding, full of NaN, change no state and no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import rnn  # not nn.GRU: torch_xla puts its own there
from torch.utils import _pytree as pytree

from kp_dynamo import mark_sequence
from kp_dynamo.telemetry import snapshot
from tests.spine import compiled

LENGTHS = (5, 17, 16, 9, 30)
BUCKETS = [16, 32]
TWO_WAYS = {"bidirectional": True, "num_layers": 2}

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")
    torch._dynamo.reset()


def leaves(value: object) -> list[Tensor]:
    return pytree.tree_leaves(value)


def assert_padded_and_right(model: nn.Module, given: Callable[[int], Tensor], dims: tuple[int, ...]) -> None:
    """Results and gradients at all lengths, of one program forward and one backward for each bucket."""
    eager = copy.deepcopy(model)
    run = compiled(model, fullgraph=True, buckets=BUCKETS)
    before = snapshot()
    for length in LENGTHS:
        x = given(length)
        mine, own = (x.clone().requires_grad_() for _ in range(2))
        for dim in dims:
            mark_sequence(mine, dim)
        found, wanted = leaves(run(mine)), leaves(eager(own))
        incoming = [torch.randn_like(t) for t in wanted]
        found += torch.autograd.grad(found, [mine, *model.parameters()], incoming)
        wanted += torch.autograd.grad(wanted, [own, *eager.parameters()], incoming)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    after = snapshot()
    assert after["bucket_refusals"] == before["bucket_refusals"]
    assert after["exact_lengths"] == before["exact_lengths"]
    assert after["programs"] - before["programs"] <= 4 ** len(dims)


@pytest.mark.quick("RNN-how4-False")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ("LSTM", "GRU", "RNN") for how in ({}, TWO_WAYS)]
    + [("LSTM", {"proj_size": 3, "bidirectional": True}), ("RNN", {"nonlinearity": "relu", "bias": False})],
)
def test_steps_of_padding_are_left_out(kind, how, batch_first):
    model = getattr(rnn, kind)(5, 6, batch_first=batch_first, **how)
    shape = (lambda length: (3, length, 5)) if batch_first else (lambda length: (length, 3, 5))
    assert_padded_and_right(model, lambda length: torch.randn(shape(length)), (1 if batch_first else 0,))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0,), (0, 1)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_padded_batches(kind, dims):
    model = getattr(rnn, kind)(5, 6, batch_first=True, **TWO_WAYS)
    assert_padded_and_right(model, lambda n: torch.randn(n, n + 1 if 1 in dims else 7, 5), dims)


class Classifier(nn.Module):
    """Reads the last step, the final state and the mean: each of the true length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = rnn.LSTM(5, 6, batch_first=True, **TWO_WAYS)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        results, (h, c) = self.layers(x)
        results = self.norm(results + results.flip(1))
        return self.head(results[:, -1] + results.mean(1)) + (h.sum((0, 2)) + c.amax((0, 2)))[:, None]


@pytest.mark.slow
def test_a_classifier_of_sequences():
    assert_padded_and_right(Classifier(), lambda length: torch.randn(3, length, 5), (1,))


@pytest.mark.quick("float32")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inference_without_gradients(precision):
    model, double = Classifier().eval(), Classifier().double().eval()
    double.load_state_dict(model.state_dict())
    run, before = compiled(model, fullgraph=True, buckets=BUCKETS, precision=precision), snapshot()["programs"]
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn(3, length, 5)
            bound = 1e-5 if precision == "float32" else 2e-2
            assert (run(mark_sequence(x, 1)) - double(x.double())).norm() <= bound * double(x.double()).norm()
    assert snapshot()["programs"] - before == 2
