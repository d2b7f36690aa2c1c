"""Times, sizes and prices in units that fit: a small model takes microseconds and costs nothing per million."""

from __future__ import annotations

from dataclasses import dataclass

_SHORT_MS = 0.01
_FEW_USD = 0.01
FAR_APART = 3.0
"""Two estimates of one figure that differ by more than this factor need a reason, and which to believe."""


@dataclass(frozen=True)
class TimeUnit:
    """The unit of all times of a report, so that they can be compared.

    Attributes:
        name: "s", "ms" or "us".
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


@dataclass(frozen=True)
class SizeUnit:
    """The unit of all sizes of a table or a picture; `num_bytes` is how many bytes it has."""

    name: str
    num_bytes: int

    def number(self, size: float) -> str:
        """A size without its unit."""
        value = size / self.num_bytes
        return f"{value:.0f}" if self.num_bytes == 1 or value >= 1000 else f"{value:.1f}"

    def text(self, size: float) -> str:
        """A size with its unit."""
        return f"{self.number(size)} {self.name}"


MICROSECONDS, MILLISECONDS, SECONDS = TimeUnit("us", 1e3), TimeUnit("ms", 1.0), TimeUnit("s", 1e-3)
SIZES = (SizeUnit("GiB", 2**30), SizeUnit("MiB", 2**20), SizeUnit("KiB", 2**10), SizeUnit("bytes", 1))


def time_unit(modelled_ms: float) -> TimeUnit:
    """Microseconds for a step that takes less than 10 of them, else milliseconds."""
    return MICROSECONDS if 0 < modelled_ms < _SHORT_MS else MILLISECONDS


def unit_of_time(ms: float) -> TimeUnit:
    """The largest unit in which a time is at least one."""
    if ms >= 1e3:
        return SECONDS
    return MICROSECONDS if 0 < ms < 1 else MILLISECONDS


def time_text(ms: float) -> str:
    """ "40 us", "13.3 ms", "2.1 s": three significant digits in the unit that fits."""
    unit = unit_of_time(ms)
    value = ms * unit.per_ms
    return f"{value:.0f} {unit.name}" if value >= 100 else f"{value:.3g} {unit.name}"


def unit_of_size(size: float) -> SizeUnit:
    """The largest unit in which a size is at least one."""
    return next((unit for unit in SIZES if size >= unit.num_bytes), SIZES[-1])


def size_text(size: float) -> str:
    """ "1.9 GiB", "63.9 MiB", "12 bytes"."""
    return unit_of_size(size).text(size)


def part_text(part: float, whole: float) -> str:
    """ "1.9 of 13.4 GiB", or "1.9 MiB of 13.4 GiB" if their units differ."""
    unit, unit_of_whole = unit_of_size(part), unit_of_size(whole)
    given = unit.number(part) if unit == unit_of_whole else unit.text(part)
    return f"{given} of {unit_of_whole.text(whole)}"


def price(usd_per_million: float, what: str) -> str:
    """A price per million, or per billion if a million costs less than a cent."""
    if 0 < usd_per_million < _FEW_USD:
        return f"{usd_per_million * 1e3:.3g} USD per billion {what}"
    return f"{usd_per_million:.2f} USD per million {what}"


def short_price(usd_per_million: float, what: str) -> str:
    """ "USD 2.16 a billion tokens": a million if a billion costs more than 10,000."""
    if usd_per_million >= 10:
        return f"USD {usd_per_million:,.2f} a million {what}"
    per_billion = usd_per_million * 1e3
    return (
        f"USD {per_billion:,.2f} a billion {what}" if per_billion >= 0.1 else f"USD {per_billion:.2g} a billion {what}"
    )


def are_far_apart(one: float, other: float) -> bool:
    """Whether two estimates of a figure differ by more than `FAR_APART`; unknown ones (0) do not."""
    return bool(one and other) and not 1 / FAR_APART <= one / other <= FAR_APART
