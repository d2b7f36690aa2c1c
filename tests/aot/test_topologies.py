"""The slices that are sold, and the time of collectives on their links."""

from __future__ import annotations

import pytest

from kp_dynamo.aot.links import HOP_S, Links
from kp_dynamo.aot.topologies import shapes_of, topology_of
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.hardware import CHIPS

MIB = 2**20


# The rows of the tables on the pages that `topologies.py` names: chips, shape, hosts.
@pytest.mark.parametrize(
    ("target", "chips", "shape", "hosts"),
    [
        ("v5e", 1, "1x1", 1), ("v5e", 4, "2x2", 1), ("v5e", 8, "2x4", 1), ("v5e", 16, "4x4", 2),
        ("v5e", 32, "4x8", 4), ("v5e", 64, "8x8", 8), ("v5e", 128, "8x16", 16), ("v5e", 256, "16x16", 32),
        ("v6e", 16, "4x4", 2), ("v6e", 256, "16x16", 32),
        ("v5p", 4, "2x2x1", 1), ("v5p", 8, "2x2x2", 2), ("v5p", 16, "2x2x4", 4), ("v5p", 32, "2x4x4", 8),
        ("v5p", 64, "4x4x4", 16), ("v5p", 128, "4x4x8", 32), ("v5p", 256, "4x8x8", 64), ("v5p", 512, "8x8x8", 128),
        ("v5p", 1024, "8x8x16", 256), ("v5p", 2048, "8x16x16", 512), ("v5p", 4096, "16x16x16", 1024),
        ("v5p", 6144, "16x16x24", 1536), ("v5p", 640, "4x8x20", 160), ("v5p", 768, "8x8x12", 192),
        ("v4", 16, "2x2x4", 4), ("v4", 768, "8x8x12", 192), ("v4", 2048, "8x16x16", 512),
        ("v7", 192, "4x4x12", 48), ("v7", 8192, "16x16x32", 2048),
    ],
)  # fmt: skip
def test_a_number_of_chips_is_the_vendors_shape(target, chips, shape, hosts):
    topology = topology_of(target, chips)
    assert (str(topology), topology.num_hosts, topology.num_chips) == (shape, hosts, chips)
    assert topology_of(target, str(chips)) == topology_of(target, shape) == topology


def test_a_shape_may_be_another_than_the_default():
    assert topology_of("v5p", "4x4x16").num_chips == topology_of("v5p", "4x8x8").num_chips == 256


@pytest.mark.parametrize(
    ("target", "shape", "wraps"),
    [
        ("v5e", "8x8", (False, False)),
        ("v5e", "8x16", (False, True)),
        ("v6e", "16x16", (True, True)),
        ("v5p", "2x4x4", (False, False, False)),
        ("v5p", "4x4x4", (True, True, True)),
        ("v4", "4x8x8", (True, True, True)),
    ],
)
def test_links_wrap_around_only_where_they_exist(target, shape, wraps):
    assert topology_of(target, shape).wraps == wraps


@pytest.mark.parametrize(
    ("target", "chips", "expected"),
    [
        ("v5e", 12, r"chips=12 is invalid for target='v5e': it is not sold. Nearest: 8 \(2x4\), 16 \(4x4\), 32"),
        ("v5e", 512, r"Nearest: 64 \(8x8\), 128 \(8x16\), 256 \(16x16\)"),
        ("v5p", 1, r"Nearest: 4 \(2x2x1\), 8 \(2x2x2\), 16 \(2x2x4\)"),
        ("v5e", "4x2", r"chips='4x2' is invalid for target='v5e': the shape is not sold. Nearest: .*8 \(2x4\)"),
        ("v5e", "2x2x2", "the shape is not sold"),
        ("v5p", "4x4", "the shape is not sold"),
        ("v5e", 0, "Allowed: a number > 0, or a shape such as 4x4"),
        ("v5p", "many", "Allowed: a number > 0, or a shape such as 2x2x4"),
        ("v5e", True, "Allowed: a number > 0"),
        ("v5e", 4.0, "Allowed: a number > 0"),
    ],
)
def test_chips_that_are_not_sold_are_refused(target, chips, expected):
    with pytest.raises(TPUConfigurationError, match=expected):
        topology_of(target, chips)


def test_each_chip_has_its_own_place():
    topology = topology_of("v5p", "2x4x4")
    places = [topology.coordinates(chip) for chip in range(32)]
    assert len(set(places)) == 32
    assert places[:6] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1)]


def test_no_shape_is_listed_twice():
    assert all(len(shapes_of(target)) == len(set(shapes_of(target))) for target in CHIPS)


# The vendor's bandwidth of a chip, both directions: v5e 400 GB/s over 4 links, v5p and v7 1200 over 6, v6e 800 over 4.
@pytest.mark.parametrize(
    ("target", "expected"), [("v5e", 5e10), ("v5p", 1e11), ("v6e", 1e11), ("v7", 1e11), ("v4", 4.5e10)]
)
def test_a_link_has_its_share_of_the_bandwidth_of_a_chip(target, expected):
    assert Links(topology_of(target, 8)).bytes_per_s == pytest.approx(expected)


def row(start: int, count: int, step: int = 1) -> tuple[int, ...]:
    return tuple(range(start, start + count * step, step))


def test_a_ring_is_twice_as_fast_as_a_line():
    line, ring = Links(topology_of("v5e", "8x8")), Links(topology_of("v5e", "16x16"))
    assert line.seconds("all-gather", 64 * MIB, [row(0, 8)]) == pytest.approx(64 * MIB * 7 / 8 / 5e10)
    assert ring.seconds("all-gather", 64 * MIB, [row(0, 16)]) == pytest.approx(64 * MIB * 15 / 16 / 1e11)
    half_of_a_ring = ring.seconds("all-gather", 64 * MIB, [row(0, 8)])
    assert half_of_a_ring == line.seconds("all-gather", 64 * MIB, [row(0, 8)])


def test_a_group_along_two_axes_uses_the_links_of_both():
    links = Links(topology_of("v5e", "4x4"))
    both, one = links.seconds("all-gather", 64 * MIB, [row(0, 16)]), links.seconds("all-gather", 64 * MIB, [row(0, 4)])
    assert both / one == pytest.approx((15 / 16 / 2) / (3 / 4))


def test_interleaved_groups_share_their_links():
    """Two groups of every second chip of a row: each link carries the traffic of both."""
    links = Links(topology_of("v5e", "8x8"))
    every_second, neighbours = [row(0, 4, 2), row(1, 4, 2)], [row(0, 4), row(4, 4)]
    shared, alone = (links.seconds("all-gather", 64 * MIB, groups) for groups in (every_second, neighbours))
    assert shared == pytest.approx(2 * alone)
    assert links.seconds("all-to-all", 64 * MIB, every_second) == 2 * links.seconds("all-to-all", 64 * MIB, neighbours)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    links, group = Links(topology_of("v5p", "4x4x4")), [row(0, 4, 16)]
    reduced, gathered = (links.seconds(kind, 64 * MIB, group) for kind in ("reduce-scatter", "all-gather"))
    assert links.seconds("all-reduce", 64 * MIB, group) == reduced + gathered


def test_an_all_to_all_crosses_the_middle():
    """Four chips in a line: two of them send half of what they have over the one link in the middle."""
    assert Links(topology_of("v5e", "4x4")).seconds("all-to-all", 8 * MIB, [row(0, 4)]) == 2 * 4 * MIB / 5e10


def test_a_short_message_takes_a_microsecond_a_hop():
    links = Links(topology_of("v5e", "4x4"))
    assert links.seconds("all-gather", 64, [row(0, 4)]) == pytest.approx(3 * HOP_S)
    assert links.permute_seconds(64, [(0, 1)]) == HOP_S
    assert links.seconds("all-reduce", 64, [(0,)]) == 0


def test_a_permute_takes_as_long_as_its_most_loaded_link():
    line, ring = Links(topology_of("v5e", "4x4")), Links(topology_of("v5p", "4x4x4"))
    shift = [(i, (i + 1) % 4) for i in range(4)]
    assert line.permute_seconds(8 * MIB, shift) == pytest.approx(8 * MIB / 5e10)  # back to the first, the other way
    assert ring.permute_seconds(8 * MIB, shift) == pytest.approx(8 * MIB / 1e11)
    by_two = [(0, 2), (1, 3)]
    assert line.permute_seconds(8 * MIB, by_two) == pytest.approx(2 * 8 * MIB / 5e10)  # both need the link from 1 to 2
    assert line.permute_seconds(8 * MIB, [(3, 3)]) == 0
