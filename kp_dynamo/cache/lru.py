"""A bounded least-recently-used cache with statistics, safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypedDict, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")


class CacheStats(TypedDict):
    """Counters since the cache was made; `clear` does not reset them.

    `hit_rate` is hits / (hits + misses), 0.0 before the first look-up.
    """

    size: int
    max_size: int
    hits: int
    misses: int
    hit_rate: float
    evictions: int


class LRUCache(Generic[K, V]):
    """Keeps at most `max_size` entries; inserting over the bound evicts the least recently used entry.

    Args:
        max_size: Bound on the number of entries, at least 1.
        on_evict: Called with (key, value) of every entry that the bound, `resize` or `clear` removes. It runs when
            the cache is consistent again and outside its lock, so that it may use the cache.

    Raises:
        ValueError: `max_size` is below 1.
    """

    def __init__(self, max_size: int, *, on_evict: Callable[[K, V], None] | None = None) -> None:
        self._max_size = _checked_bound(max_size)
        self._on_evict = on_evict
        self._entries: OrderedDict[K, V] = OrderedDict()
        # Reentrant: a finalizer of a value may run at any allocation inside the lock and use the cache.
        self._lock = threading.RLock()
        self._hits = self._misses = self._evictions = 0
        # The last key that was used, unless `clear` removed it. The bound is at least 1 and never evicts it.
        self._newest: K | None = None

    def get(self, key: K, default: D | None = None) -> V | D | None:
        """The value of `key`, which becomes the most recently used, or `default`; counts a hit or a miss."""
        with self._lock:
            if key not in self._entries:
                self._misses += 1
                return default
            self._hits += 1
            self._entries.move_to_end(key)
            self._newest = key
            return self._entries[key]

    def touch(self, key: K) -> bool:
        """Mark `key` as recently used without counting; False if it is missing. For hot paths."""
        if key is self._newest:
            return True
        with self._lock:
            try:
                self._entries.move_to_end(key)
            except KeyError:
                return False
            self._newest = key
            return True

    def set(self, key: K, value: V) -> None:
        """Store `value` as the most recently used; an earlier value of `key` is replaced, not evicted."""
        with self._lock:
            replaced = self._entries.pop(key, None)
            self._entries[key] = value
            self._newest = key
            gone = self._shrink()
        del replaced  # its finalizer runs here, outside the lock
        self._notify(gone)

    def resize(self, max_size: int) -> None:
        """Change the bound and evict the least recently used entries over it."""
        _checked_bound(max_size)
        with self._lock:
            self._max_size = max_size
            gone = self._shrink()
        self._notify(gone)

    def clear(self) -> None:
        """Remove every entry. This does not count as evictions: no entry was over the bound."""
        with self._lock:
            gone = list(self._entries.items())
            self._entries.clear()
            self._newest = None
        self._notify(gone)

    def keys(self) -> list[K]:
        """A snapshot of the keys, least recently used first."""
        with self._lock:
            return list(self._entries)

    def get_stats(self) -> CacheStats:
        """A consistent snapshot of the counters."""
        with self._lock:
            looked_up = self._hits + self._misses
            return CacheStats(
                size=len(self._entries),
                max_size=self._max_size,
                hits=self._hits,
                misses=self._misses,
                hit_rate=self._hits / looked_up if looked_up else 0.0,
                evictions=self._evictions,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether `key` is cached; neither counts nor marks it as used."""
        with self._lock:
            return key in self._entries

    def _shrink(self) -> list[tuple[K, V]]:
        """Remove the entries over the bound, least recently used first; call with the lock held."""
        num_over = max(0, len(self._entries) - self._max_size)
        self._evictions += num_over
        return [self._entries.popitem(last=False) for _ in range(num_over)]

    def _notify(self, gone: list[tuple[K, V]]) -> None:
        if self._on_evict is not None:
            for key, value in gone:
                self._on_evict(key, value)


def _checked_bound(max_size: int) -> int:
    if max_size < 1:
        raise ValueError(f"max_size={max_size} is invalid. Allowed: an int >= 1. Try: clear(), to empty the cache")
    return max_size
