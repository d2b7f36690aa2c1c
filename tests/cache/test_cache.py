"""The bounded cache: what it keeps, counts and tells, from one thread and from several."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kp_dynamo.cache import LRUCache

pytestmark = pytest.mark.compat


def test_the_least_recently_used_entry_is_evicted_first():
    cache = LRUCache(2)
    cache.set("a", 1)
    cache.set("b", 2)
    cache.get("a")
    cache.set("c", 3)
    assert cache.keys() == ["a", "c"]


def test_a_missing_key_gives_the_default():
    cache = LRUCache(2)
    cache.set("none", None)
    assert cache.get("nothing") is None
    assert cache.get("nothing", "default") == "default"
    assert cache.get("none", "default") is None


def test_statistics_count_looks_and_evictions():
    cache = LRUCache(1)
    assert cache.get_stats()["hit_rate"] == 0.0
    cache.set("a", 1)
    for key in ("a", "a", "a", "b"):
        cache.get(key)
    cache.set("b", 2)
    expected = {"size": 1, "max_size": 1, "hits": 3, "misses": 1, "hit_rate": 0.75, "evictions": 1}
    assert cache.get_stats() == expected
    assert len(cache) == 1


def test_touch_keeps_an_entry_alive_without_counting():
    cache = LRUCache(2)
    cache.set("a", 1)
    cache.set("b", 2)
    assert cache.touch("a")
    assert not cache.touch("nothing")
    cache.set("c", 3)
    assert cache.keys() == ["a", "c"]
    assert (cache.get_stats()["hits"], cache.get_stats()["misses"]) == (0, 0)


def test_contains_neither_counts_nor_keeps_alive():
    cache = LRUCache(1)
    cache.set("a", 1)
    assert "a" in cache
    assert "b" not in cache
    assert (cache.get_stats()["hits"], cache.get_stats()["misses"]) == (0, 0)


def test_setting_a_key_again_replaces_without_evicting():
    gone = []
    cache = LRUCache(2, on_evict=lambda key, value: gone.append(key))
    cache.set("a", 1)
    cache.set("b", 2)
    cache.set("a", 3)
    assert cache.keys() == ["b", "a"]
    assert cache.get("a") == 3
    assert (gone, cache.get_stats()["evictions"]) == ([], 0)


def test_whoever_listens_hears_of_every_entry_let_go():
    gone = []
    cache = LRUCache(3, on_evict=lambda key, value: gone.append((key, value)))
    for value, key in enumerate("abcd"):
        cache.set(key, value)
    assert gone == [("a", 0)]
    cache.resize(1)
    assert gone == [("a", 0), ("b", 1), ("c", 2)]
    cache.clear()
    assert gone == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]
    assert cache.get_stats()["evictions"] == 3


def test_clear_empties_and_keeps_the_counters():
    cache = LRUCache(2)
    cache.set("a", 1)
    cache.get("a")
    cache.clear()
    assert (len(cache), cache.get_stats()["hits"], cache.get_stats()["evictions"]) == (0, 1, 0)


def test_resize_gives_room():
    cache = LRUCache(1)
    cache.resize(2)
    cache.set("a", 1)
    cache.set("b", 2)
    assert cache.keys() == ["a", "b"]
    assert cache.get_stats()["max_size"] == 2


@pytest.mark.parametrize("max_size", [0, -1])
def test_a_bound_below_one_is_refused(max_size):
    message = rf"max_size={max_size} is invalid. Allowed: an int >= 1"
    with pytest.raises(ValueError, match=message):
        LRUCache(max_size)
    cache = LRUCache(1)
    with pytest.raises(ValueError, match=message):
        cache.resize(max_size)
    assert cache.get_stats()["max_size"] == 1


def test_the_listener_may_use_the_cache_from_another_thread():
    """It would wait forever for a lock that `set` still held."""
    sizes = []

    def listen(key, value):
        thread = threading.Thread(target=lambda: sizes.append(cache.get_stats()["size"]), daemon=True)
        thread.start()
        thread.join(timeout=10)

    cache = LRUCache(1, on_evict=listen)
    cache.set("a", 1)
    cache.set("b", 2)
    assert sizes == [1]


class _UsesTheCacheWhenItDies:
    def __init__(self, cache):
        self.cache = cache

    def __del__(self):
        self.cache.touch("b")


@pytest.mark.parametrize("let_go", [lambda c: c.set("a", 0), lambda c: c.resize(1), lambda c: c.clear()])
def test_a_value_may_use_the_cache_when_it_dies(let_go):
    cache = LRUCache(2)
    cache.set("a", _UsesTheCacheWhenItDies(cache))
    cache.set("b", 1)
    let_go(cache)
    assert type(cache.get("a")) is not _UsesTheCacheWhenItDies


class _YieldingKey(int):
    """Lets another thread run in the middle of every look-up, as a key with a Python hash may."""

    def __hash__(self):
        time.sleep(0)
        return int.__hash__(self)


def test_threads_lose_no_count_and_never_exceed_the_bound():
    gone = []
    cache = LRUCache(8, on_evict=lambda key, value: gone.append(key))

    def work(number):
        for turn in range(2000):
            key = _YieldingKey((number * 7 + turn) % 16)
            cache.get(key)
            cache.set(key, turn)
            cache.touch(key)
            assert len(cache) <= 8

    failures = _run_in_threads(work, 4)
    stats = cache.get_stats()
    assert not failures
    assert stats["hits"] + stats["misses"] == 4 * 2000
    assert stats["evictions"] == len(gone)


def _run_in_threads(work, num_threads):
    failures = []

    def guarded(number):
        try:
            work(number)
        except Exception as failure:  # noqa: BLE001 - handed to the test, which fails on any
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


_STEP = st.tuples(st.sampled_from(["get", "set", "touch", "resize", "clear"]), st.integers(1, 6))


@given(st.lists(_STEP, max_size=60))
def test_it_behaves_like_a_list_that_is_searched(steps):
    """Against the simplest model there is: a list of keys, least recently used first."""
    cache, model, bound = LRUCache(3), [], 3
    for action, key in steps:
        if action == "clear":
            cache.clear()
            model = []
        elif action == "resize":
            cache.resize(bound := key)
        elif action == "set":
            cache.set(key, -key)
            model = [k for k in model if k != key] + [key]
        elif key in model:
            model = [k for k in model if k != key] + [key]
            assert cache.get(key) == -key if action == "get" else cache.touch(key)
        else:
            assert cache.get(key) is None if action == "get" else not cache.touch(key)
        model = model[max(0, len(model) - bound) :]
        assert cache.keys() == model
