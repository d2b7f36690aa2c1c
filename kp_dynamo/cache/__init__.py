"""Cache keys of compilations, why a key missed, and the bounded cache of programs."""

from kp_dynamo.cache.lru import LRUCache

__all__ = ["LRUCache"]
