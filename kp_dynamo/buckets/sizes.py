"""Which padded length a true length gets: the option `buckets`, as a pure function."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kp_dynamo.exceptions import TPUValidationError


@dataclass(frozen=True)
class Buckets:
    """The lengths that programs are compiled for.

    Attributes:
        given: "pow2", a rising tuple of lengths, or {"min":, "max":, "step":}.
        over: What a length over the last bucket does: "exact" is its own size, "error" raises.
    """

    given: Literal["pow2"] | tuple[int, ...] | Mapping[str, int]
    over: Literal["error", "exact"] = "exact"

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """All buckets, rising; None where there is no last one."""
        if isinstance(self.given, Mapping):
            low, high, step = self.given["min"], self.given["max"], self.given["step"]
            return (*range(low, high, step), high)
        return None if self.given == "pow2" else tuple(self.given)

    def size_for(self, length: int, cap: int | None = None) -> int:
        """The padded size of a true length.

        Args:
            length: The true length.
            cap: What the model takes at most (the rows of its position table); a bucket above it is cut down to it.

        Raises:
            TPUValidationError: The length is over the last bucket, and that is an error.
        """
        sizes = self.sizes
        if sizes is None:
            size = 1 << max(0, length - 1).bit_length()
        elif length > sizes[-1]:
            if self.over == "error":
                raise TPUValidationError(
                    f"a length of {length} is over the last bucket, {sizes[-1]}. Add a bucket, cut the input, or let "
                    "such lengths be compiled as they are with options={'over_bucket': 'exact'}."
                )
            size = length
        else:
            size = sizes[bisect.bisect_left(sizes, length)]
        return size if cap is None else max(length, min(size, cap))
