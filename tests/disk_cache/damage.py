"""Damage to the content of a file."""

from collections.abc import Callable


def flip(position: int) -> Callable[[bytes], bytes]:
    """Content with the lowest bit of a byte flipped."""

    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return damage
