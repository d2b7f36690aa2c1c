"""Whether two calls get the same objects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kp_dynamo.compat.same_objects import holds_same


@pytest.mark.parametrize("kind", [list, tuple])
@given(data=st.data())
def test_identity_at_some_positions(kind, data):
    """Objects that are equal are not the same."""
    pool = [torch.zeros(2) for _ in range(3)] + [1.5, float("1.5"), "text", None]
    picks = st.lists(st.integers(0, len(pool) - 1), min_size=4, max_size=4)
    before, after = data.draw(picks), data.draw(picks)
    positions = data.draw(st.lists(st.integers(0, 3), unique=True))
    same = holds_same(kind(pool[i] for i in before), positions)
    for picked in (before, after, before):
        expected = all(pool[picked[i]] is pool[before[i]] for i in positions)
        assert same(kind(pool[i] for i in picked)) is expected


def test_it_keeps_nothing_alive():
    class Object:
        gone = False

        def __del__(self):
            Object.gone = True

    values = [Object()]
    same = holds_same(values, [0])
    values.clear()
    assert Object.gone
    del same
