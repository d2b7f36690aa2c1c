"""Right or refused, never wrong: merged dimensions beside others, and lengths as numbers, at four lengths each."""

from __future__ import annotations

import pytest

from tests.buckets import layouts, values
from tests.buckets.harness import refused

# torch advises against corrections that leave nothing to divide by and boundaries with gaps, and computes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous:UserWarning"),
]

LENGTHS = (7, 3, 5, 11)
ALL = layouts.CASES | values.CASES
QUICK = (
    "added_to_flat", "buckets_of_a_padded_table", "diagonal_by_step", "embedded_flat", "flat_rolled", "last_five",
    "loss_against_numbers",
    "loss_of_each_flat_token", "numbered_gathered_by_flat", "padded_by_reflection", "scatter_added_by_number",
    "segment_sums", "times_a_comparison", "written_over_all",
)  # fmt: skip
# What has no rule, and why: compiled for each length, with a warning. Whoever adds a rule takes the name out.
REFUSED = {
    "convolved_in_steps_of_a_length": "the length is used as its argument stride",
    "convolved_with_a_length_between": "the length is used as its argument dilation",
    "convolved_with_half_as_padding": "the length is used as its argument padding",
    "filled_up_to_twenty_by_pad": "the length is used as its argument pad",
    "ignored_by_length": "targets are ignored that equal the length",
    "multiplied_by_length": "the length is the alpha of addmm",
    "padded_by_half": "the length is used as its argument pad",
    "scattered_length": "the length of a tensor that is no input",
    "threshold_of_length": "the length is a threshold",
    "transposed_in_steps_of_a_length": "the length is used as its argument stride",
    "variance_corrected_by_length": "the length is a correction",
}
REFUSED_IN_TRAINING = {
    "padded_by_replication": "replication_pad1d_backward",
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")


def check(name):
    fn = ALL[name]
    found = refused(fn, trains=False, lengths=LENGTHS), refused(fn, trains=True, lengths=LENGTHS)
    assert found == (name in REFUSED, name in REFUSED or name in REFUSED_IN_TRAINING)


@pytest.mark.quick("segment_sums", "flat_rolled", "times_a_comparison", "buckets_of_a_padded_table")
@pytest.mark.parametrize("name", QUICK)
def test_right_at_every_length(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ALL) - set(QUICK)))
def test_right_at_every_length_of_the_others(name):
    check(name)


def test_few_are_refused():
    assert len(ALL) >= 170
    assert len(REFUSED) + len(REFUSED_IN_TRAINING) <= 16
