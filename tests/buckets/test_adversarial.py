"""Right or refused, never wrong: every function at eight lengths, its padding full of NaN."""

from __future__ import annotations

import pytest

from tests.buckets.functions import QUICK, SLOW
from tests.buckets.harness import refused

# torch advises against the mean of F.kl_div, and computes it.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")

# What has no rule, and why: compiled for each length, with a warning. Whoever adds a rule takes the name out.
REFUSED = {
    "adaptive_max_pool": "a pool whose windows depend on the length",
    "average_pool": "at lengths 2 and 3 torch fixes a size of 1",
    "halves": "at lengths 2 and 3 torch fixes a size of 1",
    "length_split_in_pairs": "at lengths 2 and 3 torch fixes a size of 1",
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")


def check(name, fn):
    found = refused(fn, trains=False), refused(fn, trains=True)
    assert found == (name in REFUSED, name in REFUSED)


@pytest.mark.quick(
    "next_token_loss", "convolution", "softmax_over_length", "with_begin_token", "cumulative_sum", "length_as_a_value",
    "batch_norm", "flipped", "first_largest",
)  # fmt: skip
@pytest.mark.parametrize("name", sorted(QUICK))
def test_right_at_every_length(name):
    check(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_right_at_every_length_of_the_others(name):
    check(name, SLOW[name])


def test_few_are_refused():
    assert len(QUICK) >= 30
    assert len(QUICK) + len(SLOW) >= 120
    assert len(REFUSED) <= 24
