"""Divided graphs whose lengths are padded to buckets, with padding that reveals reads of it."""

import copy

import pytest
import torch
from torch import nn

from kp_dynamo import mark_sequence
from tests.blocks import stacks
from tests.blocks.test_composition import close
from tests.blocks.test_divided_models import divided, flat
from tests.spine import DEVICES, on


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")


class Mixing(stacks.Stack):
    """Each layer mixes along the sequence, and adds to a loss."""

    def forward(self, x):
        x, loss = self.embed(x), 0.0
        for layer in self.layers:
            x = torch.softmax(layer(x), 1).roll(1, 1) + x.mean(1, keepdim=True)
            loss = loss + x.var(1).sum()
        return self.head(x), loss, x.shape[1]


class Rows(nn.Module):
    """Values of [B * T, D] pass from layer to layer: their padding is between true elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        x = x.reshape(-1, 8)
        for layer in self.layers:
            y = torch.softmax(layer(x).view(batch, length, 8), 1)
            x = torch.tanh(y.cumsum(1) + x.view(batch, length, 8).mean(1, keepdim=True)).reshape(-1, 8)
        return x.sum(0)


def step(model, x):
    model.zero_grad()
    results = model(x)
    tensors = [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
    sum(t.square().sum() for t in tensors).backward()
    return flat(results), flat([p.grad for p in model.parameters()]), [t.shape for t in tensors]


def check(eager, device, width):
    """As eager, for lengths that share a padded length and for another; returns what became of each graph."""
    mine, events = divided(copy.deepcopy(eager).to(device), buckets="pow2")
    for length in (5, 7, 3):
        x = torch.linspace(-1, 1, 2 * length * width).view(2, length, width)
        got, wanted = step(mine, mark_sequence(x.to(device), 1)), step(eager, x)
        assert close(got[0], wanted[0])
        assert close(got[1], wanted[1])
        assert got[2] == wanted[2]
    return [[piece.runs for piece in event.pieces] or event.reason for event in events]


@pytest.mark.parametrize("device", ["xla", pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_true_lengths_reach_each_piece(device):
    assert check(Mixing(), device, 3) == [[1, 3, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_padding_between_true_elements(device):
    assert check(Rows(), device, 8) == [[1, 3, 1]]


def test_a_piece_without_its_lengths_as_dimensions():
    """Only [B * T, D] enters it, from which neither length can be read."""
    weights = [torch.randn(8, 8) for _ in range(4)]

    def rows(x):
        x = x.reshape(-1, 8)
        for weight in weights:
            x = torch.tanh(x @ weight) * 0.5 + x.mean(0)
        return x.sum(0)

    reason = reason_for(rows, mark_sequence(mark_sequence(torch.randn(3, 5, 8), 0), 1))
    assert reason == "its lengths are padded to buckets, and a piece cannot be padded by itself"


@pytest.mark.slow
def test_a_piece_that_cannot_be_padded_leaves_the_graph_whole():
    (reason,) = check(stacks.Views(), "cpu", 3)
    assert reason == "its lengths are padded to buckets, and a piece cannot be padded by itself"


def reason_for(fn, *args, **options):
    mine, events = divided(fn, buckets="pow2", **options)
    with torch.no_grad():
        wanted = fn(*on("cpu", args))
        assert close(flat(mine(*args)), flat(wanted))
    return events[0].reason


def test_a_returned_input():
    model, drop = stacks.Stack(), nn.Dropout(0.0)
    reason = reason_for(lambda x: (model(x), drop(x)), mark_sequence(torch.randn(2, 5, 3), 1))
    assert reason == "its lengths are padded to buckets, and it returns an input"


def test_a_written_input():
    model, cache = stacks.Cached(), [mark_sequence(torch.randn(2, 6, 8), 0) for _ in range(4)]
    reason = reason_for(model, mark_sequence(torch.randn(2, 1, 8), 0), torch.tensor([3]), cache)
    assert reason == "its lengths are padded to buckets, and it writes to an input of such a length"
