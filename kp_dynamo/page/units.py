"""Times and prices of a report in units that fit: a small model takes microseconds and costs nothing per million."""

from __future__ import annotations

from dataclasses import dataclass

_SHORT_MS = 0.01
_FEW_USD = 0.01


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times of a report, so that they can be compared.

    Attributes:
        name: "ms" or "us".
        per_ms: How many of it a millisecond has.
    """

    name: str
    per_ms: float

    def number(self, ms: float, digits: int = 3) -> str:
        """A time without its unit; a small one has two significant digits."""
        value = ms * self.per_ms
        return f"{value:.2g}" if 0 < value < 10 ** (1 - digits) else f"{value:.{digits}f}"

    def text(self, ms: float, digits: int = 3) -> str:
        """A time with its unit."""
        return f"{self.number(ms, digits)} {self.name}"


def time_unit(modelled_ms: float) -> TimeUnit:
    """Microseconds for a step that takes less than 10 of them, else milliseconds."""
    return TimeUnit("us", 1e3) if 0 < modelled_ms < _SHORT_MS else TimeUnit("ms", 1.0)


def price(usd_per_million: float, what: str) -> str:
    """A price per million, or per billion if a million costs less than a cent."""
    if 0 < usd_per_million < _FEW_USD:
        return f"{usd_per_million * 1e3:.3g} USD per billion {what}"
    return f"{usd_per_million:.2f} USD per million {what}"
