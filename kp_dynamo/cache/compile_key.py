"""The identity of a compilation, in named parts."""

from __future__ import annotations

from dataclasses import dataclass, field

Parts = tuple[tuple[str, object], ...]


@dataclass(frozen=True, eq=False)
class CompileKey:
    """Everything that determines a compiled program, in named parts.

    The hash is computed once: a key with a long graph text is looked up on every compilation and touched
    on every call. Parts compare by `==`, for which 1, 1.0 and True are equal: a part must hold constants
    as text.
    """

    parts: Parts
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompileKey):
            return NotImplemented
        return self is other or (self._hash == other._hash and self.parts == other.parts)

    def __reduce__(self) -> tuple[type[CompileKey], tuple[Parts]]:
        """Hashes of strings differ between processes, so a copy recomputes its hash."""
        return CompileKey, (self.parts,)
