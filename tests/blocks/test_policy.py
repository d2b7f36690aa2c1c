"""When `blocks="auto"` divides, and how the pieces share the memory of the chip."""

import copy

import pytest
import torch
from torch import nn

from kp_dynamo.blocks.node_effects import Effects
from kp_dynamo.blocks.policy import Speed, host_seconds, is_block, step_seconds
from kp_dynamo.blocks.step_memory import step_shares
from kp_dynamo.capture.capture import read_capture
from kp_dynamo.graph.step_share import WHOLE, StepShare
from kp_dynamo.passes.recompute.budget import Budget, fitted
from tests.blocks import stacks
from tests.blocks.dividing import divide
from tests.blocks.test_divided_models import divided
from tests.graphs import trace_joint

MATMUL, ADD = Effects(flops=1000, num_bytes=10), Effects(num_bytes=10)


def test_a_layer_has_a_matmul_and_more():
    assert is_block([MATMUL, ADD, ADD, ADD], 3)
    assert not is_block([ADD] * 9, 3)
    assert not is_block([MATMUL, ADD], 3)
    assert is_block([Effects(flops=10, num_calls=9)], 3)


def test_a_step_takes_at_least_the_time_of_its_matmuls():
    fast_memory, fast_units = Speed(100.0, 1e9), Speed(1e9, 10.0)
    pieces = [([MATMUL, ADD], 4), ([MATMUL], 1)]
    assert step_seconds(pieces, fast_memory, trains=False) == 50
    assert step_seconds(pieces, fast_units, trains=False) == 5
    assert step_seconds(pieces, fast_memory, trains=True) == 150


def test_one_program_adds_no_host_time():
    assert host_seconds(1, trains=True) == 0
    assert host_seconds(11, trains=True) == 2 * host_seconds(11, trains=False) > 0


def test_auto_leaves_a_small_model_whole_and_says_why():
    mine, events = divided(stacks.Stack(), blocks="auto")
    mine(torch.randn(2, 5, 3))
    assert events[0].reason.startswith("6 calls in place of one add ")
    assert events[0].reason.endswith(", more than 5%")


def test_auto_divides_a_large_model():
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x)) * 0.5 + x
            return x.sum()

    mine, events = divided(Wide(), blocks="auto")
    with torch.no_grad():
        mine(torch.randn(256, 512))
    assert [piece.runs for piece in events[0].pieces] == [4, 1]


def test_a_share_of_the_memory():
    share = StepShare(outside_bytes=100, inside_bytes=20, fraction=0.25, runs=3, others_bytes=7)
    assert share.of(520) == 20 + 400 * 0.25
    assert share.activation_bytes(50, 8) == 50 + 2 * 8 + 7
    assert WHOLE.of(520) == WHOLE.activation_bytes(520, 8) == 520


def test_a_model_that_surely_fits_shares_no_memory():
    """So that models of different depths share the programs of their layers."""
    assert shares_of_stack(budget_bytes=1e9) == [StepShare("rest"), StepShare("layer"), StepShare("rest")]


def test_what_all_layers_save_is_held_at_once():
    before, layer, after = shares_of_stack(budget_bytes=1e6)
    assert before.fraction + 16 * layer.fraction + after.fraction == pytest.approx(1)
    held = {share.outside_bytes + share.inside_bytes for share in (before, layer, after)}
    assert len(held) == 1  # parameters, gradients and optimizer state of the whole step
    assert layer.of(1e6) < 1e6 / 16


def shares_of_stack(budget_bytes):
    found = []

    def backend(gm, inputs):
        division, capture = divide(gm, inputs), read_capture(gm, inputs, with_modules=False)
        found.extend(step_shares(division, capture.inputs, budget_bytes, optimizer_state_factor=2.0))
        return gm.forward

    torch.compile(stacks.Stack(16), backend=backend)(torch.randn(64, 32, 3))
    return found


def test_less_memory_recomputes_more():
    def layer(x, weight):
        return torch.tanh(torch.tanh(x @ weight).exp() * 2).sum()

    tagged = {}
    for share in (WHOLE, StepShare(fraction=0.3)):
        joint = trace_joint(layer, torch.randn(512, 64), torch.randn(64, 64, requires_grad=True))
        budget = Budget(2e6, 0.0, vmem_bytes=0, narrow_matmuls=False, is_hard_limit=False, share=share)
        tagged[share] = fitted(joint, "checkpoint_auto", budget).rewritten
    assert tagged[WHOLE] == 0
    assert tagged[StepShare(fraction=0.3)] > 0


def test_a_budget_that_one_layer_fits_and_the_step_does_not():
    mine, _ = divided(stacks.Stack(16), checkpoint="auto", memory_budget_gb=0.0012)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"The smallest sufficient budget is 0\.002 GB"):
        mine(torch.randn(64, 32, 3))


def test_only_what_is_saved_adds_up():
    """16 inputs of layers are 1.05 MB. A layer alone takes more than its share of the budget while it runs."""
    mine, events = divided(stacks.Stack(16), checkpoint="auto", memory_budget_gb=0.002)
    mine(torch.randn(64, 32, 3)).sum().backward()
    assert [piece.runs for piece in events[0].pieces] == [1, 16, 1]


def test_sizes_that_dynamo_made_constant_count_as_numbers():
    """They are SymInts in the metadata of Dynamo's graph, though no number in it varies."""

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

        def forward(self, x, rows):
            for layer in self.layers:
                x = layer(x)
            total = rows.detach().clone()
            for row in range(1, rows.shape[0]):
                total[row].copy_(rows[row - 1])
            return x

    model = Unrolled()
    run = torch.compile(model, backend="kp_tpu", options={"precision": "float32"}, dynamic=True)
    x, rows = torch.randn(4, 8, 4, requires_grad=True), torch.randn(8, 4)
    torch.testing.assert_close(run(x, rows), model(x, rows))
