"""`torch.utils.checkpoint(use_reentrant=True)`: the run without gradients and the one with them drop the same numbers.

The two are different graphs, which the passes may rewrite in different ways and which may be divided in different ways.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.spine import compiled

SIZE = 8


def scores(q, k, bias):
    return q @ k.mT + bias


def a_learned_mask(q, k, v, bias):
    return F.dropout(scores(q, k, bias).softmax(-1), 0.5) @ v


def probabilities_that_are_read(q, k, v, bias):
    weights = scores(q, k, bias[:1].detach()).softmax(-1)
    return F.dropout(weights, 0.5) @ v + 0 * weights.detach().max()


def scores_that_are_read(q, k, v, bias):
    found = q @ k.mT
    return F.dropout(found.softmax(-1), 0.5) @ v + 0 * found.detach().max()


def torch_s_attention(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.5)


ATTENTIONS = [a_learned_mask, probabilities_that_are_read, scores_that_are_read, torch_s_attention]


@pytest.mark.quick("a_learned_mask", "probabilities_that_are_read")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention(attention):
    torch.manual_seed(0)
    q, k, bias = (torch.randn(2, 2, SIZE, SIZE, requires_grad=True) for _ in range(3))
    v = torch.eye(SIZE).expand(2, 2, SIZE, SIZE).clone().requires_grad_()
    weights = checkpoint(compiled(attention, precision="float32"), q, k, v, bias, use_reentrant=True)
    weights.square().sum().backward()
    # v is the identity, so the result is the probabilities after dropout, and d/dv of the sum of squares 2 w^T w.
    assert 0.3 < (weights == 0).float().mean() < 0.7
    torch.testing.assert_close(v.grad, 2 * weights.detach().mT @ weights.detach())


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.dropout(self.other(F.gelu(F.dropout(self.one(x), 0.2))), 0.3)


@pytest.mark.quick("on-2", "2-4")
@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("blocks", ["off", "on", 2])
def test_layers(num_layers, blocks):
    """The numbers do not depend on the programs into which the layers are divided."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Layer(16) for _ in range(num_layers)]), torch.randn(4, 16)
    run = compiled(model, precision="float32", blocks=blocks)
    whole = compiled(lambda x: model(x), precision="float32", blocks="off")
    found = []
    for function, context in ((run, torch.no_grad), (run, torch.enable_grad), (whole, torch.enable_grad)):
        torch.manual_seed(1)
        with context():
            found.append((function(x).detach(), torch.rand(1)))
    for result, after in found[1:]:
        torch.testing.assert_close(result, found[0][0])
        assert torch.equal(after, found[0][1])


def test_results_that_nothing_reads_are_counted():
    def step(x):
        F.dropout(x, 0.5)
        return F.dropout(x, 0.5)

    x, found = torch.ones(4, 64, requires_grad=True), []
    run = compiled(step)
    for context in (torch.no_grad, torch.enable_grad):
        torch.manual_seed(1)
        with context():
            found.append(run(x).detach())
    assert torch.equal(*found)
