"""Divided graphs under autocast: around the call, inside the module, nested and disabled."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from kp_dynamo import compile_blocks
from kp_dynamo.capture import cpu_view
from tests.blocks import stacks
from tests.blocks.autocast_cases import CASES, Normalizing
from tests.blocks.dividing import divide
from tests.blocks.test_composition import close
from tests.blocks.test_divided_models import divided, flat
from tests.spine import run_script


def run_cases(names, devices):
    run_script(
        f"from tests.blocks.autocast_cases import main; main(*{names}, devices={devices})",
        {"XLA_FLAGS": "--xla_allow_excess_precision=false"},
    )


@pytest.mark.parametrize(("make", "is_inside"), [(stacks.Stack, False), (stacks.Autocast, True)])
def test_softmax_of_xla_tensors(make, is_inside):
    """XLA computes it in float32, and the CPU, on which the graph is traced, in bfloat16."""
    eager = make(4, Normalizing).to("xla")
    x = torch.randn(2, 5, 3, device="xla")
    mine, events = divided(copy.deepcopy(eager))
    with torch.autocast("xla", torch.bfloat16, enabled=not is_inside), torch.no_grad():
        got, wanted = mine(x), eager(x)
    assert got.dtype is wanted.dtype
    assert close(flat(got.cpu()), flat(wanted.cpu()), 0.02)
    assert [piece.runs for piece in events[0].pieces] == [1, 3, 1]  # the first layer gets bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_case_as_the_whole_graph(name):
    run_cases((name,), ("cpu", "xla"))


class Regions(nn.Module):
    """Layers in a region and after it."""

    def __init__(self, device):
        super().__init__()
        self.device, self.first, self.layers = device, nn.Linear(3, 8), nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16):
            x = self.first(x)
            for layer in self.layers[:3]:
                x = layer(x)
        return self.layers[3](x.float()), x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.quick("xla-xla")
@pytest.mark.parametrize("region", ["cpu", "xla"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_compiled_children_in_a_region(device, region):
    """A region for another device has no effect."""
    eager, x = Regions(region).to(device), torch.randn(2, 3, device=device)
    mine = compile_blocks(copy.deepcopy(eager), options={"precision": "float32"})
    with torch.no_grad():
        for _ in range(2):
            for got, wanted in zip(mine(x), eager(x), strict=True):
                assert got.dtype is wanted.dtype
                assert close(flat(got.float().cpu()), flat(wanted.float().cpu()), 0.03)
    assert got.dtype is (torch.bfloat16 if device == region else torch.float32)


def test_a_region_that_begins_in_one_piece_and_ends_in_another():
    eager = stacks.Autocast()
    mine, events = divided(copy.deepcopy(eager))
    x = torch.randn(2, 5, 3)
    for model in (mine, eager):
        model(x).square().sum().backward()
    assert [piece.runs for piece in events[0].pieces] == [1, 4, 1]
    got, wanted = (flat([p.grad for p in model.parameters()]) for model in (mine, eager))
    assert close(got, wanted, 0.02)


def test_a_written_input_that_shares_memory():
    """Two halves of one tensor; our trace sees them as two tensors."""

    def step(x, weights, one, other):
        for weight in weights:
            x = torch.tanh(x @ weight) * 0.5 + x
        one.copy_(x[:2])
        return x + other.sum()

    base, weights = torch.ones(4, 8, device="xla"), [torch.randn(8, 8, device="xla") for _ in range(4)]
    mine, events = divided(step)
    with torch.autocast("xla", torch.bfloat16):
        mine(torch.ones(4, 8, device="xla"), weights, base[:2], base[2:])
    assert events[0].reason == "it is under autocast, and writes to an input that shares memory with another"


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (
            6,
            torch.int64,
            "under the CPU's autocast, its values cannot be computed: self.size(-1) must be divisible by 4",
        ),
        (8, torch.int32, "under the CPU's autocast, view differs from Dynamo's in more than its dtype"),
    ],
)
def test_values_that_differ_in_more_than_their_dtype(width, dtype, reason, monkeypatch):
    """As if a rule of XLA were unknown: float32 by Dynamo, bfloat16 in our trace. Open regions are left."""
    monkeypatch.setattr(cpu_view, "rules_of_xla", contextlib.nullcontext)

    def step(x, weights):
        with torch.autocast("xla", torch.bfloat16):
            for weight in weights:
                x = torch.tanh(x @ weight) * 0.5 + x
            return torch.softmax(x @ weights[0][:, :width], -1).view(dtype)

    found = []

    def backend(gm, inputs):
        found.append(divide(gm, inputs))
        return lambda *args: (args[0],)

    weights = [torch.randn(8, 8, device="xla") for _ in range(4)]
    torch.compile(step, backend=backend)(torch.ones(4, 8, device="xla"), weights)
    assert found[0].reason.startswith(reason)
    assert not torch.is_autocast_enabled("cpu")
