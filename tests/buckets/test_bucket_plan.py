"""The planner: against every choice of buckets, and what it says."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kp_dynamo
from kp_dynamo.exceptions import TPUValidationError


def cost_of(buckets, lengths, compile_s):
    return sum(min(b for b in buckets if b >= n) for n in lengths) + compile_s * len(buckets)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([0.0, 3.0, 50.0]))
def test_no_other_choice_costs_less(lengths, max_programs, compile_s):
    plan = kp_dynamo.plan_buckets(lengths, max_programs, compile_s=compile_s)
    distinct = sorted(set(lengths))
    choices = [
        (*c, distinct[-1]) for k in range(min(max_programs, len(distinct))) for c in combinations(distinct[:-1], k)
    ]
    assert plan.cost == pytest.approx(min(cost_of(c, lengths, compile_s) for c in choices))
    assert plan.cost == pytest.approx(cost_of(plan.buckets, lengths, compile_s))
    assert sum(plan.num_steps) == len(lengths)
    assert len(plan.buckets) <= max_programs


def test_waste_is_the_share_of_padding():
    plan = kp_dynamo.plan_buckets({10: 1, 20: 1}, max_programs=1)
    assert plan.buckets == (20,)
    assert plan.waste_percent == pytest.approx(25.0)


def test_a_step_may_cost_more_than_its_length():
    lengths = [10] * 5 + [90] * 5 + [100] * 5
    assert kp_dynamo.plan_buckets(lengths, 2).buckets == (10, 100)
    steep = kp_dynamo.plan_buckets(lengths, 2, step_cost=lambda n: float(n > 95))
    assert steep.buckets == (90, 100)


def test_lengths_are_equal_as_numbers():
    lengths = [3, 3, 3, 8, 8, 20]
    plan = kp_dynamo.plan_buckets(lengths, 2, compile_s=1.0)
    keys = {torch.tensor(n): lengths.count(n) for n in (3, 8)} | {torch.tensor(20): 0, torch.tensor(20): 1}
    for same in (torch.tensor(lengths), np.array(lengths), keys):
        assert kp_dynamo.plan_buckets(same, 2, compile_s=1.0) == plan


def test_expensive_programs_are_few():
    assert len(kp_dynamo.plan_buckets(range(1, 50), 8, compile_s=1e6).buckets) == 1


def test_text_and_picture(tmp_path):
    plan = kp_dynamo.plan_buckets([3, 3, 8])
    assert "2 programs, 0.0% of what is computed is padding" in str(plan)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lengths", "how", "says"),
    [
        ([], {}, "lengths is empty"),
        ({5: 0}, {}, "lengths is empty"),
        ([0, 3], {}, "a length is 0"),
        ([2.5], {}, "a length is 2.5"),
        (torch.tensor([2.5]), {}, r"a length is tensor\(2.5"),
        (torch.ones(2, 2, dtype=torch.int64), {}, r"a length is tensor\(\[1, 1"),
        ({3: -1}, {}, "count of a length is negative"),
        ([3], {"max_programs": 0}, "max_programs=0 is invalid"),
        ([3], {"max_programs": 1.5}, "max_programs=1.5 is invalid. Allowed: an int"),
        ([3], {"max_programs": True}, "max_programs=True"),
        ([3], {"compile_s": -1.0}, "compile_s=-1.0"),
        ([3], {"compile_s": float("nan")}, "compile_s=nan is invalid. Allowed: a number >= 0"),
        ([3], {"step_cost": 5}, "step_cost=5 is invalid. Allowed: None or a function"),
        ([3], {"step_cost": lambda n: "x"}, r"step_cost\(3\)='x'"),
        ([3], {"step_cost": lambda n: -1}, r"step_cost\(3\)=-1"),
        (5, {}, "lengths=5 is invalid. Allowed: a list of ints"),
    ],
)
def test_bad_input(lengths, how, says):
    with pytest.raises(TPUValidationError, match=says):
        kp_dynamo.plan_buckets(lengths, **how)
