"""The order of protobuf maps, on messages that are written by hand."""

import ctypes
import itertools

import pytest

from tests.disk_cache.process import NATIVE, build


@pytest.fixture(scope="module")
def sort(tmp_path_factory):
    """`sort_map_entries` of the library: None if it does not take the message, else the sorted message."""
    path = build(tmp_path_factory.mktemp("canonical") / "sort.so", NATIVE / "canonical.c", visibility="default")
    function = ctypes.CDLL(str(path)).sort_map_entries

    def call(message: bytes, *fields: int) -> bytes | None:
        buffer = ctypes.create_string_buffer(message, len(message))
        numbers = (ctypes.c_uint64 * (len(fields) + 1))(*fields, 0)
        is_sorted = function(buffer, ctypes.c_size_t(len(message)), numbers)
        return buffer.raw if is_sorted else None

    return call


def varint(value: int) -> bytes:
    head = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([byte | 0x80 for byte in head[:-1]] + head[-1:])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def pair(key: str, value: str) -> bytes:
    return field(1, key.encode()) + field(2, value.encode())


PAIRS = [pair("grad_x", "false"), pair("grad_y", "false"), pair("a", "x" * 300)]
NUMBER, REAL, FLOAT = varint(5 << 3) + varint(1 << 40), varint(6 << 3 | 1) + b"12345678", varint(7 << 3 | 5) + b"1234"


def _instruction(order) -> bytes:
    return field(1, b"dot.1") + NUMBER + REAL + field(68, b"".join(field(1, PAIRS[i]) for i in order)) + FLOAT


def _module(*orders) -> bytes:
    instructions = b"".join(field(2, _instruction(order)) for order in orders)
    return field(1, b"module") + field(3, field(1, b"main") + instructions) + field(3, field(1, b"other"))


def test_all_orders_become_one(sort):
    orders = list(itertools.permutations(range(3)))
    found = {sort(_module(one, other), 3, 2, 68, 1) for one, other in itertools.product(orders, orders)}
    assert len(found) == 1
    assert sorted(found.pop()) == sorted(_module(*orders[:2]))


def test_only_the_order_of_this_map_goes(sort):
    """Fields elsewhere keep theirs, and other values stay others."""
    message = _module((0, 1, 2))
    assert sort(message, 3, 2, 67, 1) == sort(message, 4, 2, 68, 1) == message
    swapped = field(3, field(2, field(1, b"b")) + field(2, field(1, b"a")))
    assert sort(swapped, 3, 2, 68, 1) == swapped
    assert sort(_module((0, 1)), 3, 2, 68, 1) != sort(_module((0, 2)), 3, 2, 68, 1)


def test_runs_of_entries_do_not_mix(sort):
    """What stands between them stays where it is."""
    message = field(1, b"d") + field(1, b"c") + NUMBER + field(1, b"b") + field(1, b"a")
    assert sort(message, 1) == field(1, b"c") + field(1, b"d") + NUMBER + field(1, b"a") + field(1, b"b")


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_message_that_ends_too_early_is_refused_or_whole(sort, cut):
    message = _module((0, 1, 2))[:-cut]
    found = sort(message, 3, 2, 68, 1)
    assert found is None or sorted(found) == sorted(message)


@pytest.mark.parametrize(
    "message", [b"\x0b", b"\x80" * 12, field(3, b"x")[:-1], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_what_is_no_message_is_refused(sort, message):
    assert sort(message, 3, 2, 68, 1) is None


def test_nothing(sort):
    assert sort(b"", 3, 2, 68, 1) == b""
