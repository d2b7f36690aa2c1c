"""What makes two compilations equal, why one missed, and the bounded cache of programs."""

from kp_dynamo.cache.lru import LRUCache

__all__ = ["LRUCache"]
