"""What a report says about the disk cache, from counters before and after. tests/disk_cache fills real ones."""

from kp_dynamo.explanation.disk_report import disk_lines, disk_report

BEFORE = {
    "state": "on",
    "folder": "/programs",
    "hits": 2,
    "misses": {"absent": 1, "damaged": 0},
    "saved": 1,
    "unsaved": {"not_saved": 0},
    "evictions": 0,
    "loaded_bytes": 1_000_000,
    "saved_bytes": 5,
    "compile_s": 4.0,
    "load_s": 0.25,
    "read_s": 0.125,
    "avoided_compile_s": 3.0,
}


def test_only_what_happened_between():
    after = {**BEFORE, "hits": 5, "misses": {"absent": 2, "damaged": 1}, "unsaved": {"not_saved": 2}}
    after |= {"loaded_bytes": 3_500_000, "load_s": 0.5, "avoided_compile_s": 10.0}
    found = disk_report(BEFORE, after)
    assert (found.hits, found.misses, found.saved, found.compile_s) == (3, {"absent": 1, "damaged": 1}, 0, 0.0)
    assert list(disk_lines(found)) == [
        "disk cache: 3 hits, 2.50 MB in 0.25 s instead of 7.00 s; 2 misses (absent 1, damaged 1)",
        "  compiled and not written: not_saved 2",
    ]


def test_nothing_happened():
    assert list(disk_lines(disk_report(BEFORE, BEFORE))) == ["disk cache: 0 hits; 0 misses"]


def test_the_device_started_during_the_run():
    """Before it, all counters are 0."""
    assert disk_report({"state": "no device has started", "folder": "/programs"}, BEFORE).hits == 2


def test_a_cache_that_is_off_says_why():
    off = {**BEFORE, "state": "the plugin lacks a function that the cache needs"}
    assert list(disk_lines(disk_report(off, off))) == [
        "disk cache: off, the plugin lacks a function that the cache needs"
    ]


def test_no_cache_no_line():
    found = disk_report({"state": "not enabled"}, {"state": "not enabled"})
    assert found is None
    assert list(disk_lines(found)) == []
