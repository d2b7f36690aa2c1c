"""Axes: what a view makes of the dimensions of a value, and which axes may be one."""

from kp_dynamo.passes.layout.axes import Axes, merged


def test_a_view_splits_an_axis_for_everybody():
    axes = Axes()
    rows, columns = axes.new(8), axes.new(6)
    dims = axes.viewed((rows, columns), (2, 4, 6))
    assert [axes.size_of(dim) for dim in dims] == [2, 4, 6]
    assert axes.of(rows) == (*dims[0], *dims[1])


def test_a_view_joins_axes():
    axes = Axes()
    dims = axes.viewed((axes.new(2), axes.new(3), axes.new(5)), (6, 1, 5))
    assert [axes.size_of(dim) for dim in dims] == [6, 1, 5]
    assert [len(dim) for dim in dims] == [2, 0, 1]


def test_a_size_that_cuts_an_axis_into_no_whole_parts():
    axes = Axes()
    assert axes.viewed((axes.new(4), axes.new(6)), (6, 4)) is None
    assert axes.viewed((axes.new(2), axes.new(9)), (6, 3)) is not None


def test_neighbours_are_one_where_they_are_neighbours_everywhere():
    a, b, c, d = range(4)
    assert merged([(a, b, c), (c, d), (a, b, d)], apart=()) == [((a, b), (c,)), ((c,), (d,)), ((a, b), (d,))]
    assert merged([(a, b, c), (c, d), (a, b, d)], apart=(a, b))[0] == ((a,), (b,), (c,))
    assert merged([(a, b), (a, b, d), (b, d)], apart=()) == [((a,), (b,)), ((a,), (b,), (d,)), ((b,), (d,))]
