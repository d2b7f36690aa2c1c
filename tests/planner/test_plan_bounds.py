"""The bounds of a plan against figures by hand; nothing is traced or compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner.bounds import Facts, link_seconds, memory_bound, time_bound
from kp_dynamo.planner.candidates import TOLERANCE, Candidate, Layout, batches, layouts, mesh_of, sold
from kp_dynamo.planner.step_facts import Activations, Amount
from kp_dynamo.planner.weights import weights_of

WIDTH = 1024
MATRIX = WIDTH * 4 * WIDTH


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )


READS = {"0.weight": 2, "2.weight": 2}


def facts(layout: Layout, activations: Activations | None = None, flops: int = 0, rows: int = 2048, train: bool = True):
    weights = weights_of(mlp(), layout.mesh, layout.sharding or "data", READS, train)
    return Facts(weights, activations or Activations((), Amount()), flops, rows, 0, 2.0, train)


def test_fsdp_divides_parameters_gradients_and_state():
    whole = Candidate(Layout(topology_of("v5e", 16), 16, 1, "data"), 1, 1, "off")
    divided = Candidate(Layout(topology_of("v5e", 16), 16, 1, "fsdp"), 1, 1, "off")
    of_whole, of_divided = (memory_bound(c, facts(c.layout)) for c in (whole, divided))
    assert of_whole.parameters == 2 * MATRIX * 4
    assert of_whole.optimizer == 2 * of_whole.parameters
    assert of_whole.gradients == of_whole.parameters
    assert of_divided.total * 16 == of_whole.total == 4 * 2 * MATRIX * 4


def test_a_weight_that_is_gathered_and_its_gradient_are_whole_beside_the_bound():
    layout = Layout(topology_of("v5e", 4), 4, 1, "fsdp")
    trained, inference = (memory_bound(Candidate(layout, 1, 1, "off"), facts(layout, train=t)) for t in (True, False))
    assert (trained.whole, inference.whole) == (MATRIX * (2 + 4), MATRIX * 2)
    assert "whole" not in trained.parts
    assert trained.total == 4 * 2 * MATRIX * 4 // 4
    whole = Layout(topology_of("v5e", 4), 4, 1, "data")
    assert memory_bound(Candidate(whole, 1, 1, "off"), facts(whole)).whole == 0


def test_gradients_and_activations_are_live_together_from_the_second_batch_on():
    layout = Layout(topology_of("v5e", 4), 4, 1, "fsdp")
    live = Activations((Amount(per_sample=10**9),), Amount())
    one = memory_bound(Candidate(layout, 1, 1, "off"), facts(layout, live))
    two = memory_bound(Candidate(layout, 1, 2, "off"), facts(layout, live))
    assert one.total == one.parameters + one.optimizer + 10**9
    assert two.total == one.total + two.gradients


def test_inference_has_no_gradients_and_no_state():
    layout = Layout(topology_of("v5e", 4), 4, 1, "data")
    found = memory_bound(Candidate(layout, 1, 1, "off"), facts(layout, train=False))
    assert (found.gradients, found.optimizer, found.total) == (0, 0, 2 * MATRIX * 4)


def test_the_time_of_matmuls_is_their_flops_at_the_peak():
    layout = Layout(topology_of("v6e", 16), 16, 1, "fsdp")
    found = time_bound(Candidate(layout, 2, 3, "off"), facts(layout, flops=10**15))
    assert found.matmuls == pytest.approx(10**15 * 2 * 3 * 16 / 16 / CHIPS["v6e"].bf16_flops)


def test_fsdp_gathers_each_weight_in_both_directions_and_scatters_its_gradient():
    """16 chips of a v5e are a line of 4 in both axes of the grid: four directions of 4.5e10 a link, no wrap-around."""
    layout = Layout(topology_of("v5e", 16), 16, 1, "fsdp")
    found = time_bound(Candidate(layout, 16, 1, "off"), facts(layout))
    once = 2 * MATRIX * 2 * 15 / 16 / (2 * 400e9 / 8)  # two weights in two bytes an element
    assert found.links == pytest.approx(3 * once)


def test_data_reduces_each_gradient_once_a_batch():
    layout = Layout(topology_of("v5e", 16), 16, 1, "data")
    one, four = (time_bound(Candidate(layout, 1, n, "off"), facts(layout)).links for n in (1, 4))
    assert one == pytest.approx(2 * 2 * MATRIX * 2 * 15 / 16 / (2 * 400e9 / 8))
    assert four == pytest.approx(4 * one)


def test_few_rows_move_instead_of_the_weight():
    layout = Layout(topology_of("v5e", 4), 4, 1, "fsdp")
    weights = facts(layout).weights
    assert weights.gathered_bytes(rows=8) == 2 * 2 * 8 * WIDTH * 2
    assert weights.gathered_bytes(rows=10**6) == 2 * 2 * MATRIX * 2


def test_a_row_matmul_sums_its_result_over_the_model_axis():
    mesh = mesh_of(2, 2)
    weights = weights_of(mlp(), mesh, {"0": "colwise", "2": "rowwise"}, READS, True)
    assert weights.num_bytes == 2 * MATRIX * 4 // 2
    assert weights.summed_bytes(rows=512, train=False) == 512 * WIDTH * 2
    # The model's input needs no gradient, so nothing sums one. That is possible for the first pair of any model.
    assert weights.summed_bytes(rows=512, train=True) == 512 * WIDTH * 2
    assert weights.result_bytes(rows=512, train=True) == 2 * 512 * WIDTH * 2


def test_results_are_ranked_by_what_moves_and_bounded_by_the_least_that_may():
    """Many rows: moving the weight in their place would be less, but no compiler does."""
    layout = Layout(topology_of("v5e", 4), 1, 4, "tensor")
    weights = weights_of(mlp(), layout.mesh, {"0": "colwise", "2": "rowwise"}, READS, True)
    time = time_bound(Candidate(layout, 4, 1, "off"), Facts(weights, Activations((), Amount()), 0, 2048, 0, 2.0, True))
    once = 2 * 3 / 4 / (2 * 400e9 / 8)  # an all-reduce of a byte among four chips, two links each
    assert time.result_sums == pytest.approx((MATRIX // 4) * 2 * once)
    assert time.whole_result_sums == pytest.approx(2 * 4 * 2048 * WIDTH * 2 * once)
    assert time.with_exposed_sums == pytest.approx(time.whole_result_sums + time.optimizer)
    assert time.total == pytest.approx(time.result_sums + time.optimizer)


def test_ways_are_ranked_as_if_weights_and_gradients_move_whole():
    """Nothing tells how many rows a matmul of an image has."""
    layout = Layout(topology_of("v5e", 4), 4, 1, "fsdp")
    time = time_bound(Candidate(layout, 4, 1, "off"), facts(layout, rows=1))
    many = time_bound(Candidate(layout, 4, 1, "off"), facts(layout, rows=10**6))
    assert time.gradient_sums < many.gradient_sums
    assert time.with_exposed_sums == pytest.approx(many.with_exposed_sums)
    assert set(time.parts) == {"matmuls", "traffic", "gathers", "gradient_sums", "result_sums", "optimizer"}


class OwnLinear(nn.Linear):
    """As Falcon has it."""


@pytest.mark.parametrize("row", [nn.Linear, OwnLinear, Conv1D])
def test_results_of_each_kind_of_row_matmul_are_summed(row):
    model = nn.Sequential(row(WIDTH, 2 * WIDTH))
    rows_dim = 0 if row is Conv1D else 1
    placement = tuple("model" if dim == rows_dim else None for dim in range(2))
    weights = weights_of(model, mesh_of(2, 2), {"0.weight": placement}, {"0.weight": 1}, False)
    columns = model[0].weight.shape[1 - rows_dim]
    assert weights.summed_bytes(rows=64, train=False) == 64 * columns * 2


def test_a_parameter_that_no_program_reads_has_no_gradient_and_no_state():
    layout = Layout(topology_of("v5e", 4), 4, 1, "data")
    weights = weights_of(mlp(), layout.mesh, "data", {"0.weight": 2}, True)
    assert (weights.num_bytes, weights.trained_bytes, weights.unread_bytes) == (2 * MATRIX * 4, MATRIX * 4, MATRIX * 4)
    found = memory_bound(Candidate(layout, 1, 1, "off"), Facts(weights, Activations((), Amount()), 0, 1, 0, 2.0, True))
    assert (found.optimizer, found.unread) == (2 * MATRIX * 4, MATRIX * 4)
    assert weights.reduced_bytes(rows=10**6) == MATRIX * 2


def test_the_optimizer_moves_seven_times_the_parameters():
    """Read: parameters, gradients and two states; written: parameters and two states."""
    layout = Layout(topology_of("v5e", 4), 4, 1, "fsdp")
    found = time_bound(Candidate(layout, 1, 1, "off"), facts(layout))
    assert found.optimizer == pytest.approx(7 * 2 * MATRIX * 4 / 4 / CHIPS["v5e"].hbm_bytes_per_s)


def test_one_chip_communicates_with_nobody():
    layout = Layout(topology_of("v5e", 1), 1, 1, "")
    assert time_bound(Candidate(layout, 4, 1, "off"), facts(layout)).links == 0
    assert link_seconds(Layout(topology_of("v5e", 4), 4, 1, "data"), "data", "all-reduce", 0) == 0


@given(data=st.integers(1, 300), step=st.floats(1, 5000))
def test_batches_meet_the_step_within_the_tolerance(data, step):
    for samples, accumulate in batches(data, step):
        assert accumulate >= 1
        assert abs(samples * data * accumulate - step) <= TOLERANCE * step


@given(
    samples=st.integers(1, 64), accumulate=st.integers(1, 8), chips=st.sampled_from([4, 8, 16, 256]),
    sharding=st.sampled_from(["data", "fsdp"]), flops=st.integers(0, 10**15), live=st.integers(0, 10**8),
)  # fmt: skip
def test_a_bound_is_no_more_than_its_parts_in_turn_and_no_less_than_each(
    samples, accumulate, chips, sharding, flops, live
):
    layout = Layout(topology_of("v5e", chips), chips, 1, sharding)
    known = facts(layout, Activations((Amount(live, live),), Amount(live)), flops)
    candidate = Candidate(layout, samples, accumulate, "off")
    time, memory = time_bound(candidate, known), memory_bound(candidate, known)
    assert max(time.matmuls, time.traffic, time.links) <= time.total
    assert time.total <= time.with_exposed_sums * (1 + 1e-9) <= time.without_overlap * (1 + 2e-9)
    assert memory.total >= max(memory.gradients, memory.activations) + memory.parameters + memory.optimizer
    larger = Candidate(layout, 2 * samples, accumulate, "off")
    assert memory_bound(larger, known).total >= memory.total
    assert time_bound(larger, known).total >= time.total


def test_only_what_is_sold_is_searched():
    assert [t.num_chips for t in sold("v5e", 20)] == [1, 4, 8, 16]
    assert [t.num_chips for t in sold("v5p", 64)] == [4, 8, 16, 32, 64]


def test_every_layout_uses_all_chips():
    found = list(layouts(topology_of("v5e", 16), with_tensor=True))
    assert {(f.data * f.model) for f in found} == {16}
    assert {f.sharding for f in found} == {"data", "fsdp", "tensor", "fsdp+tensor"}
    assert [f.sharding for f in layouts(topology_of("v5e", 1), with_tensor=True)] == [""]
