"""What a call writes to, found on fake tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.blocks.node_effects import effects_of
from tests.blocks.stacks import Layer
from tests.blocks.test_divided_models import divided

# The positions, among the tensors a [4, 4], b [4, 4] and c [4], of those that are written to.
WRITES = {
    "a sum": (lambda a, b, c: a + b, {}),
    "in place": (lambda a, b, c: a.mul_(b), {"a"}),
    "an output": (lambda a, b, c: torch.mm(a, a, out=b), {"b"}),
    "an item": (lambda a, b, c: a.__setitem__(0, c), {"a"}),
    "foreach": (lambda a, b, c: torch._foreach_mul_([a, b], 2.0), {"a", "b"}),
    "foreach of views": (lambda a, b, c: torch._foreach_add_(list(b.split(2)), 1.0), {"b"}),
    "foreach copies": (lambda a, b, c: torch._foreach_copy_([a], [b]), {"a"}),
    "foreach without a write": (lambda a, b, c: torch._foreach_mul([a, b], 2.0), {}),
    "a fused optimizer": (
        lambda a, b, c: torch._fused_sgd_(
            [a], [b], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False, maximize=False,
            is_first_step=False,
        ),
        {"a", "b"},  # the gradients too, says the schema
    ),
    "statistics": (lambda a, b, c: F.batch_norm(a, c, b[0], training=True), {"b", "c"}),
    "statistics in inference": (lambda a, b, c: F.batch_norm(a, c, b[0], training=False), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    call, expected = WRITES[name]
    graph = torch.fx.Graph()
    inputs = {key: graph.placeholder(key) for key in "abc"}
    mode = FakeTensorMode()
    with mode:
        for key, node in inputs.items():
            node.meta["example_value"] = torch.empty((4,) if key == "c" else (4, 4))
    node = graph.call_function(call, tuple(inputs.values()))
    found = effects_of(torch.fx.GraphModule({}, graph), node, mode).writes
    assert {"abc"[position] for position in found} == set(expected)


class Decaying(nn.Module):
    """Layers, and then a write to tensors that nothing reads."""

    def __init__(self, write):
        super().__init__()
        self.layers, self.write = nn.ModuleList(Layer() for _ in range(3)), write
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("var", torch.full((4,), 3.0))

    def forward(self, x, values):
        y = x + 1
        for layer in self.layers:
            x = layer(x)
        self.write(self.mean, self.var, values)
        return y


LAST = {
    "foreach": lambda mean, var, values: torch._foreach_mul_([mean, var], 0.9),
    "statistics": lambda mean, var, values: F.batch_norm(values, mean, var, training=True),
}


@pytest.mark.parametrize("name", LAST)
def test_a_last_write_that_nothing_reads_is_done(name):
    model = Decaying(LAST[name])
    eager = copy.deepcopy(model)
    run, events = divided(model)
    x, values = torch.ones(2, 5, 8), torch.arange(12.0).view(3, 4)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(run(x, values), eager(x, values), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.mean, eager.mean)
        torch.testing.assert_close(model.var, eager.var)
    assert events[0].pieces
