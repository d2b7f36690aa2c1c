"""Collectives on v7, whose chips are two devices with a link of their own. Bandwidths in GB/s are of one direction.

A link between chips has 1200 / 12 = 100, the link within a chip six times as much.
"""

from __future__ import annotations

import pytest

from kp_dynamo.aot.links import HOP_S, Links
from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.exceptions import TPUConfigurationError

GB = 10**9
LINE = Links(topology_of("v7", 4))  # 2x2x1: two axes of two chips, without wrap-around links
CUBE = Links(topology_of("v7", "4x4x4"))  # three axes with them: 6 x 100
ALL_OF_LINE, ALL_OF_CUBE = tuple(range(8)), tuple(range(128))


def test_devices_are_numbered_chip_by_chip():
    topology = topology_of("v7", 16)
    assert (str(topology), topology.num_chips, topology.num_devices, topology.num_hosts) == ("2x2x4", 16, 32, 4)
    assert [topology.coordinates(device) for device in (0, 1, 2, 7, 8)] == [
        (0, 0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 3), (0, 1, 0),
    ]  # fmt: skip
    assert [topology.chip_of(device) for device in (0, 1, 2, 31)] == [0, 0, 1, 15]


def test_elsewhere_a_chip_is_one_device():
    for target in ("v4", "v5e", "v5p", "v6e"):
        topology = topology_of(target, 16)
        assert topology.num_devices == topology.num_chips == 16


def test_the_devices_of_a_chip_exchange_halves():
    assert LINE.bytes_per_s == 100 * GB
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        assert LINE.seconds(kind, 12 * GB, [(0, 1), (2, 3), (4, 5), (6, 7)]) == pytest.approx(6 / 600)
    assert LINE.seconds("all-reduce", 12 * GB, [(0, 1)]) == pytest.approx(2 * 6 / 600)
    assert LINE.seconds("all-gather", 12, [(0, 1)]) < HOP_S  # no link between chips is used


def test_all_devices_together_take_data_into_a_chip_once():
    # 3 of 4 parts enter each chip, over 2 links. Within the chip, 6 GB at 600 take less.
    assert LINE.seconds("all-gather", 12 * GB, [ALL_OF_LINE]) == pytest.approx(9 / 200)
    assert LINE.seconds("all-reduce", 12 * GB, [ALL_OF_LINE]) == pytest.approx(2 * 9 / 200)
    # 63 of 64 parts over 6 links, both directions of 3 rings.
    assert CUBE.seconds("all-gather", 64 * GB, [ALL_OF_CUBE]) == pytest.approx(63 / 600)


def test_groups_of_one_device_a_chip_share_the_links():
    # The first devices of the chips are a group, the second ones another one: each has half of 200.
    assert LINE.seconds("all-gather", 12 * GB, [ALL_OF_LINE[::2], ALL_OF_LINE[1::2]]) == pytest.approx(9 / 100)
    # Along one axis of the 2x2 chips: half of one link, half of what is gathered comes in.
    assert LINE.seconds("reduce-scatter", 12 * GB, [(0, 2), (1, 3)]) == pytest.approx(6 / 50)
    # Both devices of two chips in a row.
    assert LINE.seconds("reduce-scatter", 12 * GB, [(0, 1, 2, 3)]) == pytest.approx(6 / 100)


def test_an_all_to_all_of_both_devices_crosses_the_middle():
    # Along an axis of two chips, the two devices of one send half of 12 GB each over the link to the other one.
    for group in ((0, 1, 2, 3), (0, 2)):
        assert LINE.seconds("all-to-all", 12 * GB, [group]) == pytest.approx(2 * 6 / 100)


def test_a_permute_uses_the_link_within_a_chip_only_for_its_other_device():
    assert LINE.permute_seconds(6 * GB, [(0, 1), (1, 0)]) == pytest.approx(6 / 600)
    assert LINE.permute_seconds(6 * GB, [(0, 2)]) == pytest.approx(6 / 100)
    assert LINE.permute_seconds(6 * GB, [(0, 2), (1, 3)]) == pytest.approx(2 * 6 / 100)  # both over one link
    assert LINE.permute_seconds(6 * GB, [(0, 3)]) == pytest.approx(6 / 100)
    assert LINE.permute_seconds(6, [(0, 1)]) < HOP_S
    assert LINE.permute_seconds(6, [(0, 2)]) == HOP_S
    assert LINE.permute_seconds(6 * GB, [(1, 1)]) == 0


def test_the_smallest_slice_of_v7_has_four_chips():
    with pytest.raises(TPUConfigurationError, match=r"chips=1 is invalid for target='v7'.*4 \(2x2x1\)"):
        topology_of("v7", 1)
