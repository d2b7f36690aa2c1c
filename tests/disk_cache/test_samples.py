"""Samples of a file: its content counts, and not when or where it was installed."""

import os

import pytest

from kp_dynamo.disk_cache.samples import sampled
from tests.disk_cache.damage import flip

SIZE = 4 << 20


def test_a_file_that_was_installed_again(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for path, time in ((one, 1), (two, 2)):
        path.write_bytes(bytes(SIZE))
        os.utime(path, (time, time))
    assert sampled(str(one)) == sampled(str(two))


@pytest.mark.parametrize("change", [flip(0), flip(SIZE // 32 * 16), flip(-1), lambda content: content + b"\0"])
def test_another_content(tmp_path, change):
    path = tmp_path / "plugin"
    path.write_bytes(bytes(SIZE))
    before = sampled(str(path))
    path.write_bytes(change(bytes(SIZE)))
    assert sampled(str(path)) != before


def test_a_small_file(tmp_path):
    path = tmp_path / "plugin"
    path.write_bytes(b"")
    empty = sampled(str(path))
    path.write_bytes(b"1")
    assert sampled(str(path)) != empty
