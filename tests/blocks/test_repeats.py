"""Repeated stretches of a sequence of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from kp_dynamo.blocks.repeats import Run, runs


def test_a_stretch_between_others():
    assert runs([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8], 3) == [Run(1, 10, 3)]


def test_a_run_may_end_within_a_period():
    assert runs([1, 2, 3, 1, 2, 3, 1, 2, 5], 2) == [Run(0, 8, 3)]


def test_two_runs_the_longer_first():
    assert runs([1, 2, 1, 2, 0, 3, 4, 5, 3, 4, 5], 2) == [Run(5, 11, 3), Run(0, 4, 2)]


def test_the_shorter_period_of_equal_cover_first():
    assert runs([1, 2] * 4, 2)[0] == Run(0, 8, 2)


def test_too_few_periods_are_none():
    assert runs([1, 2, 3, 1, 2, 3], 3) == []
    assert runs([], 2) == runs([1], 2) == runs([1, 2, 3], 2) == []


@given(
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(10, 13), min_size=1, max_size=6),
    st.integers(2, 5),
    st.lists(st.integers(0, 3), max_size=5),
)
def test_the_longest_run_covers_what_was_repeated(before, block, count, after):
    found = runs([*before, *block * count, *after], 2)
    assert found[0].stop - found[0].start >= len(block) * count


@given(st.lists(st.integers(0, 2), max_size=30))
def test_every_run_is_periodic(ids):
    for run in runs(ids, 2):
        part = ids[run.start : run.stop]
        assert len(part) >= 2 * run.period
        assert all(a == b for a, b in zip(part, part[run.period :], strict=False))
