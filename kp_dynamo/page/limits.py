"""What limits a step: the matrix unit, the memory, the links, or nothing that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kp_dynamo.page.content import Share
from kp_dynamo.page.units import FAR_APART

UNKNOWN = "nothing known"


@dataclass(frozen=True)
class ModuleRow:
    """What the operators of one module take in a step, without those of its children.

    Attributes:
        path: Such as "layers.0.attn", "" for the model itself.
        kind: Its class, "" if unknown.
        ms: Time.
        matmul_ms: Its matmuls at the chip's peak.
        memory_ms: Its bytes at the memory's bandwidth.
        links_ms: Its communication on the links to other chips.
    """

    path: str
    kind: str
    ms: float
    matmul_ms: float = 0.0
    memory_ms: float = 0.0
    links_ms: float = 0.0


def bound_of(rows: Sequence[ModuleRow]) -> tuple[str, float]:
    """What bounds the time of all rows together, and how many times the bound the time is; 0 if there is no bound."""
    bounds = {
        "matrix unit": sum(row.matmul_ms for row in rows),
        "memory": sum(row.memory_ms for row in rows),
        "links": sum(row.links_ms for row in rows),
    }
    by = max(bounds, key=lambda name: bounds[name])
    over = sum(row.ms for row in rows) / bounds[by] if bounds[by] else 0.0
    return by if 0 < over <= FAR_APART else UNKNOWN, over


def limits_sentence(rows: Iterable[ModuleRow], what: str = "modules") -> str:
    """ "The matrix unit limits most of the step: 57% of the time is in modules that it bounds, ...".

    Args:
        rows: All of the step, each row bound by one of the limits.
        what: What the rows are.
    """
    times: Counter[str] = Counter()
    for row in rows:
        times[bound_of([row])[0]] += row.ms  # type: ignore[assignment]  # a Counter adds floats as well
    whole = sum(times.values())
    if not whole:
        return ""
    [(first, ms), *others] = times.most_common()
    most = "most" if ms > whole / 2 else "the largest part"
    told = ", ".join(_told(name, time / whole) for name, time in others if time)
    share = Share(ms / whole)
    reasons = {
        UNKNOWN: f"No bound explains {most} of the step: {share} of the time is in {what} that take more than "
        f"{FAR_APART:.0f} times every bound",
        "links": f"The links limit {most} of the step: a chip waits for them {share} of the time",
    }
    bounded = f"The {first} limits {most} of the step: {share} of the time is in {what} that it bounds"
    return f"{reasons.get(first, bounded)}{f'; {told}' if told else ''}."


def _told(name: str, share: float) -> str:
    by = {UNKNOWN: f"by {UNKNOWN}", "links": "waiting for the links"}.get(name, f"by the {name}")
    return f"{Share(share)} {by}"
