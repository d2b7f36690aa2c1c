"""Random stacks, divided and whole: results, gradients and statistics of two steps differ by rounding only."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch.utils._pytree import tree_leaves

from tests.blocks.random_stacks import BATCH, LENGTH, WIDTH, RandomStack, StackPlan, stack_plans
from tests.blocks.test_divided_models import distances, divided, named, step


def two_steps(model, x, *, trains):
    """Results, gradients and buffers after two steps with the inputs x and x / 2."""
    given = [t.detach().requires_grad_(trains) for t in (x, x / 2)]
    for t in given:
        results, gradients, buffers, of_inputs = step(model, (t,), trains=trains)
    return results, [named(gradients), of_inputs], named(buffers)


def is_none(gradients):
    return [g is None for g in tree_leaves(gradients, is_leaf=lambda g: g is None)]


def check(plan: StackPlan, device: str, *, trains: bool, blocks: str | int) -> bool:
    """Whether the graph of a plan was divided; fails if the results differ by more than the whole program is off."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    exact = RandomStack(plan).train(trains)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    parts, whole = (divided(copy.deepcopy(exact).to(device), blocks=option) for option in (blocks, "off"))
    got, wanted = (two_steps(model, x.to(device), trains=trains) for model in (parts[0], whole[0]))
    reference = two_steps(exact.double(), x.double(), trains=trains)
    assert is_none(got[1]) == is_none(wanted[1]) == is_none(reference[1])
    for part, of_whole in zip(distances(got, wanted), distances(wanted, reference), strict=True):
        assert part <= max(1e-6, 2 * of_whole)
    return bool(parts[1][0].pieces)


def check_some(num_examples, device, *, trains, blocks="on"):
    became = []

    @settings(max_examples=num_examples)
    @given(stack_plans() if blocks == "on" else stack_plans((5, 7)))
    def run(plan):
        became.append(check(plan, device, trains=trains, blocks=blocks))

    run()
    assert sum(became) > len(became) / 2  # what stays whole proves nothing


@pytest.mark.quick("cpu")
@pytest.mark.parametrize(("device", "trains"), [("xla", True), ("cpu", False)])
def test_a_few_stacks(device, trains):
    check_some(2, device, trains=trains)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("blocks", ["on", 2])
def test_many_stacks(device, trains, blocks):
    check_some(40 if blocks == "on" else 20, device, trains=trains, blocks=blocks)
