"""The peak memory of a program, from the sizes that its compiler gives."""

from __future__ import annotations

from typing import Protocol


class MemorySizes(Protocol):
    """Sizes of one program in bytes; `live_bytes` is 0 where a report of an earlier version lacks it."""

    @property
    def argument_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def temp_bytes(self) -> int: ...
    @property
    def alias_bytes(self) -> int: ...
    @property
    def generated_code_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...


def peak_bytes(sizes: MemorySizes) -> int:
    """Peak memory of a run.

    `temp_bytes` may count a buffer several times, once for each value that it holds: of the gradient of an embedding
    of 20,480 rows, 3 tables, where the compiler's own check of the memory counts 2.
    """
    together = sizes.argument_bytes + sizes.output_bytes + sizes.temp_bytes - sizes.alias_bytes
    return (min(sizes.live_bytes, together) or together) + sizes.generated_code_bytes
