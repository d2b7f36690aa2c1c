"""Two explanations of a model compared: what grew, what is new, what is gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.explanation.text_layout import table, wrapped
from kp_dynamo.graph.places import unnumbered
from kp_dynamo.page.units import size_text, time_text

_NUMBER, _SIZE, _TIME = "number", "bytes", "seconds"


@dataclass(frozen=True)
class Change:
    """One figure of two explanations.

    Attributes:
        figure: Its name.
        before: Of the first one.
        after: Of the second one.
        unit: "number", "bytes" or "seconds".
        is_judged: Whether growth makes the second one worse. Seconds depend on the machine and its load.
    """

    figure: str
    before: float
    after: float
    unit: str = _NUMBER
    is_judged: bool = True

    def grew(self, tolerance: float) -> bool:
        """Whether the second exceeds the first by more than this part of it."""
        return self.after > self.before * (1 + tolerance)

    def __str__(self) -> str:
        return f"{self.figure} {self.shown(self.before)} -> {self.shown(self.after)}"

    def shown(self, value: float) -> str:
        """One of the two with its unit."""
        if self.unit == _TIME:
            return time_text(value * 1e3)
        return size_text(value) if self.unit == _SIZE else f"{value:,.0f}"


@dataclass(frozen=True)
class ExplanationDifference:
    """The comparison of two explanations; `text()` is for people, `to_dict()` for JSON.

    Attributes:
        changes: The figures.
        new: Graph breaks, operators on the CPU and functions that are not compiled, which only the second one has.
        gone: Those that only the first one has.
        passes: How many matches each pass rewrote, where that differs.
        versions: Versions that differ: package, before, after.
        tolerance: By which part a figure may grow.
        sides: What the first one is of, and the second: file and model.
    """

    changes: tuple[Change, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    passes: tuple[Change, ...]
    versions: tuple[tuple[str, str, str], ...]
    tolerance: float
    sides: tuple[str, str] = ("", "")

    @property
    def worse(self) -> tuple[Change, ...]:
        """What grew by more than the tolerance."""
        return tuple(c for c in self.changes if c.is_judged and c.grew(self.tolerance))

    @property
    def is_worse(self) -> bool:
        """Whether a figure grew by more than the tolerance, or a problem is new."""
        return bool(self.worse or self.new)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if not self.is_worse:
            return "Nothing is worse."
        new = f"{len(self.new)} new: {self.new[0]}" if self.new else ""
        return f"Worse: {'; '.join(filter(None, [*map(str, self.worse), new]))}."

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        return {**asdict(self), "worse": [c.figure for c in self.worse], "is_worse": self.is_worse}

    def text(self) -> str:
        """The comparison for people."""
        rows = [("", "before", "after"), *((c.figure, c.shown(c.before), c.shown(c.after)) for c in self.changes)]
        lines = [*table(rows), *(f"new: {line}" for line in self.new), *(f"gone: {line}" for line in self.gone)]
        lines += [f"rewritten by {change}" for change in self.passes]
        lines += [f"{name}: {before} -> {after}" for name, before, after in self.versions]
        return wrapped([*lines, self.verdict])

    def __str__(self) -> str:
        return self.text()


def compare_explanations(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    tolerance: float = 0.05,
    names: tuple[str, str] = ("", ""),
) -> ExplanationDifference:
    """Compare two explanations, as `Explanation.to_dict` gives them.

    Args:
        before: The first one.
        after: The second one.
        tolerance: By which part a figure may grow before the second one is worse: 0.05 is 5%.
        names: What to call the two, such as the names of their files.

    Raises:
        TPUConfigurationError: The tolerance is negative, or one of them is no explanation of this version.
    """
    if not 0 <= tolerance < float("inf"):
        raise TPUConfigurationError(f"tolerance={tolerance} is invalid. Allowed: a number >= 0, such as 0.05.")
    try:
        figures = zip(_figures(before), _figures(after), strict=True)
        problems, others = _problems(before), _problems(after)
        passes = [_rewritten(before), _rewritten(after)]
        changes = [*(Change(a.figure, a.before, b.before, a.unit) for a, b in figures), *_seconds(before, after)]
        versions = [dict(before["versions"]), dict(after["versions"])]
    except (KeyError, TypeError, AttributeError) as cause:
        raise TPUConfigurationError(
            f"the explanation is incomplete: {cause!r}. Try: write it again with explain SPEC --json FILE."
        ) from cause
    return ExplanationDifference(
        tuple(changes),
        tuple(sorted((others - problems).elements())),
        tuple(sorted((problems - others).elements())),
        tuple(Change(n, passes[0][n], passes[1][n]) for n in passes[0] | passes[1] if passes[0][n] != passes[1][n]),
        tuple((n, b, a) for n in versions[0] | versions[1] if (b := _of(versions[0], n)) != (a := _of(versions[1], n))),
        tolerance,
        (_side(before, names[0]), _side(after, names[1])),
    )


def _side(found: Mapping[str, Any], name: str) -> str:
    """ "old.json, Gpt"; an explanation of an earlier version has no model."""
    return ", ".join(filter(None, (name, found.get("subject", {}).get("model", ""))))


def read_explanation(path: str) -> dict[str, Any]:
    """Read what `explain SPEC --json FILE` wrote.

    Raises:
        TPUConfigurationError: The file cannot be read as JSON, or holds no object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise TPUConfigurationError(
            f"{path} cannot be read as JSON: {cause}. Allowed: a file that explain SPEC --json FILE wrote."
        ) from cause
    if not isinstance(content, dict):
        raise TPUConfigurationError(f"{path} holds no explanation. Allowed: what explain SPEC --json FILE wrote.")
    return content


def _figures(found: Mapping[str, Any]) -> Iterator[Change]:
    """The figures of one explanation, each as its `before`."""
    graphs, totals = found["graphs"], found["totals"]
    numbers = {
        "graph breaks": len(found["graph_breaks"]),
        "functions that run eagerly": len(found["uncompiled"]),
        "operators on the CPU": len(found["fallbacks"]),
        "graphs": len(graphs),
        "XLA programs": totals["programs"],
        "cache misses": totals["misses"],
        "operators": sum(g["num_operators"] for g in graphs),
        "casts": sum(sum(g["casts"].values()) for g in graphs),
    }
    yield from (Change(name, value, value) for name, value in numbers.items())
    moved = sum(f["moved_bytes"] for f in found["fallbacks"])
    yield Change("bytes copied for them", moved, moved, _SIZE)
    whole = sum(t["size_bytes"] for t in found["whole"])
    yield Change("large tensors whole on every device", whole, whole, _SIZE)


def _seconds(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    one, other = before["seconds"], after["seconds"]
    for stage in one | other:
        yield Change(f"seconds of {stage}", one.get(stage, 0.0), other.get(stage, 0.0), _TIME, is_judged=False)


def _problems(found: Mapping[str, Any]) -> Counter[str]:
    """What is wrong, without numbers of lines, which every edit changes."""
    places = ((unnumbered(b["line"]) or "an unknown line", b["source"].strip()) for b in found["graph_breaks"])
    breaks = (f"graph break at {place}: {source}" for place, source in places)
    eager = (f"not compiled: {unnumbered(f['line'])}" for f in found["uncompiled"])
    fallbacks = {f"{f['op']} on the CPU at {unnumbered(f['line'])}" for f in found["fallbacks"]}
    return Counter([*breaks, *eager, *fallbacks])


def _rewritten(found: Mapping[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in found["passes"]:
        counts[row["name"]] += row["rewritten"]
    return counts


def _of(versions: dict[str, str], name: str) -> str:
    return str(versions.get(name, "none"))
