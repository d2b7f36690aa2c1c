"""Cache keys of compilations, why a key missed, and a bounded cache.

`session/` holds the caches of captures and of programs.
"""

from kp_dynamo.cache.lru import LRUCache

__all__ = ["LRUCache"]
