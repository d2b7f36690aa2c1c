"""Divided graphs whose sizes vary from call to call: every length gives what the whole graph gives."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.blocks import stacks
from tests.blocks.test_composition import close
from tests.blocks.test_divided_models import divided, flat
from tests.spine import DEVICES

LENGTHS = (5, 7)


class Attending(nn.Module):
    """Reads its sizes, as a GPT block does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (t.view(batch, length, 2, 4).transpose(1, 2) for t in self.qkv(x).split(8, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Scaled(stacks.Stack):
    """Computes a size once, which all layers read, and returns a size that is an input."""

    def forward(self, x):
        x, length = self.embed(x), x.shape[1] * 2 + 1
        for layer in self.layers:
            x = layer(x)
            x = x + x.reshape(-1, 8)[: length * x.shape[0] // 3].sum(0) / length
        return self.head(x), x.shape[1]


class Longer(stacks.Stack):
    """All values have a size that is no input."""

    def forward(self, x):
        x = self.embed(torch.cat([x, x[:, :2]], 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x), x


MODELS = {
    "attention": lambda: stacks.Stack(4, Attending),
    "size arithmetic": Scaled,
    "longer": Longer,
    "views": stacks.Views,
}


def marked(*shape, device="cpu", dims=(0, 1)):
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(device)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return x


def steps(model, device, **options):
    """Results and gradients for each length, and what became of each graph."""
    mine, events = divided(copy.deepcopy(model).to(device), **options)
    found = []
    for number, length in enumerate(LENGTHS):
        results = mine(marked(2 + number, length, 3, device=device))
        with torch.no_grad():
            inferred = mine(marked(2 + number, length, 3, device=device))
        mine.zero_grad()
        tensors = [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        sum(t.square().sum() for t in tensors).backward()
        gradients = [p.grad.clone() for p in mine.parameters() if p.grad is not None]
        found.append((flat(results), flat(inferred), flat(gradients), [(t.shape, t.stride()) for t in tensors]))
    return found, events


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_as_the_whole_graph(name, device):
    model = MODELS[name]()
    cut, events = steps(model, device)
    torch._dynamo.reset()
    whole, _ = steps(model, device, blocks="off")
    for mine, other in zip(cut, whole, strict=True):
        assert all(close(a, b, 1e-6) for a, b in zip(mine[:3], other[:3], strict=True))
        assert mine[3] == other[3]
    assert [[piece.runs for piece in event.pieces] for event in events] == [[1, 4, 1]] * 2  # training, inference


def test_gradients_of_each_length():
    eager = stacks.Stack(2)
    mine, events = divided(copy.deepcopy(eager).to("xla"))
    for length in LENGTHS:
        x = marked(2, length, 3, device="xla", dims=(1,))
        for model, given in ((mine, x), (eager, x.cpu())):
            model.zero_grad()
            model(given).square().sum().backward()
        got, wanted = (flat([p.grad for p in model.parameters()]) for model in (mine, eager))
        assert close(got, wanted)
    assert [[piece.runs for piece in event.pieces] for event in events] == [[1, 2, 1]]


def test_no_length_compiles_another_graph_than_in_the_whole_graph():
    """A cut adds no guard."""
    found = []
    for blocks in ("on", "off"):
        torch._dynamo.reset()
        counters.clear()
        mine, _ = divided(stacks.Stack(2), blocks=blocks)
        with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=True):
            for batch, length in ((3, 5), (3, 7), (8, 8)):
                mine(torch.ones(batch, length, 3))
        found.append(counters["stats"]["unique_graphs"])
    assert found == [2, 2] or found == [3, 3], found


def test_caches_that_are_written_to():
    eager = stacks.Cached()
    mine, events = divided(eager)
    with torch.no_grad():
        for batch in (2, 3):
            x, position = marked(batch, 1, 8, dims=(0,)), torch.tensor([1])
            given, expected = ([marked(batch, 6, 8, dims=(0,)) for _ in range(4)] for _ in range(2))
            assert close(flat(mine(x, position, given)), flat(eager(x, position, expected)))
            assert close(flat(given), flat(expected))
    assert [[piece.runs for piece in event.pieces] for event in events] == [[4]]


def reason_for(fn, *args):
    mine, events = divided(fn)
    assert close(flat(mine(*args)), flat(fn(*args)))
    return events[0].reason


def test_a_size_that_is_computed_and_returned():
    model = stacks.Stack()
    reason = reason_for(lambda x: (model(x), x.shape[1] + 1), marked(2, 5, 3))
    assert reason == "it returns a size that it computes"


def test_numbers_that_are_no_sizes():
    model = stacks.Stack()
    reason = reason_for(lambda x: model(x) * (x.shape[1] / 3), marked(2, 5, 3))
    assert reason == "it computes with numbers that vary from call to call and are not sizes"


def test_a_size_that_all_layers_read():
    """Each layer computes it from the sizes of the inputs."""

    def cut(x, weights):
        x = torch.cat([x, x[:1]])
        length = x.shape[0]
        for weight in weights:
            x = torch.tanh(x @ weight)[: length - 1].sum(0) * 0.5 + x
        return x

    weights = [torch.randn(8, 8) for _ in range(4)]
    mine, events = divided(lambda x: cut(x, weights))
    for length in (4, 6):
        x = marked(length, 8, dims=(0,))
        assert close(flat(mine(x)), flat(cut(x, weights)))
    assert [[piece.runs for piece in event.pieces] for event in events] == [[1, 4]]
