"""The groups of a collective in each of XLA's notations; those of meshes are of libtpu 0.0.51."""

from __future__ import annotations

import pytest

from kp_dynamo.aot.replica_groups import groups_of

ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={{0,1},{2,3}}, use_global_device_ids=true", ((0, 1), (2, 3))),
        ("replica_groups={}", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("replica_groups=mesh['axis_0'=8] {'axis_0'}", (tuple(range(8)),)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("replica_groups=mesh[a=2,b=4] {a,b}", (tuple(range(8)),)),
        # Parts of an axis of 8: the first two places, those in the middle, the last two, and the first and the last.
        ("replica_groups=mesh['a'=8] {'a':(1)2}", COLUMNS),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        # Meshes that number their devices in another order: 0, 4, 1, 5, 2, 6, 3, 7.
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}", COLUMNS),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", ROWS),
    ],
)
def test_each_notation_names_its_groups(attribute, expected):
    assert groups_of(f"channel_id=2, {attribute}, to_apply=%add", 8) == expected
