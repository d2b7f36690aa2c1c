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
        given: "pow2", a tuple of lengths in increasing order, or {"min":, "max":, "step":}.
        over: For a length over the last bucket: "exact" uses the length itself, "error" raises.
    """

    given: Literal["pow2"] | tuple[int, ...] | Mapping[str, int]
    over: Literal["error", "exact"] = "exact"

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """All buckets in increasing order; None if there is no last one."""
        if isinstance(self.given, Mapping):
            low, high, step = self.given["min"], self.given["max"], self.given["step"]
            return (*range(low, high, step), high)
        return None if self.given == "pow2" else tuple(self.given)

    def size_for(self, length: int, cap: int | None = None) -> int:
        """The padded size of a true length.

        Args:
            length: The true length.
            cap: The largest length that the model takes (rows of its position table); larger buckets become `cap`.

        Raises:
            TPUValidationError: The length is over the last bucket, and `over` is "error".
        """
        sizes = self.sizes
        if sizes is None:
            size = 1 << max(0, length - 1).bit_length()
        elif length > sizes[-1]:
            if self.over == "error":
                raise TPUValidationError(
                    f"a length of {length} is over the last bucket, {sizes[-1]}. Try: add a bucket, truncate the "
                    "input, or compile such lengths without padding with options={'over_bucket': 'exact'}."
                )
            size = length
        else:
            size = sizes[bisect.bisect_left(sizes, length)]
        return size if cap is None else max(length, min(size, cap))
