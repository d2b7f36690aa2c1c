"""Choose buckets for the lengths of a data set: the least padding, weighed against compiling more programs."""

from __future__ import annotations

import math
import numbers
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kp_dynamo.exceptions import TPUValidationError

_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class BucketPlan:
    """Buckets, and their cost for the lengths they were planned for.

    Attributes:
        buckets: Padded lengths in increasing order; `options={"buckets": list(plan.buckets)}`.
        num_steps: Steps that run in each bucket.
        waste_percent: Share of all padded elements that is padding.
        cost: Sum of `step_cost` over all steps, plus `compile_s` for each bucket.
        exact_cost: The cost with a bucket for every length: no padding, and the most programs.
    """

    buckets: tuple[int, ...]
    num_steps: tuple[int, ...]
    waste_percent: float
    cost: float
    exact_cost: float

    def __str__(self) -> str:
        """A table with a bar for each bucket."""
        most = max(self.num_steps)
        rows = [
            f"{size:>8}  {count:>8}  {'#' * max(1, round(_BAR * count / most))}"
            for size, count in zip(self.buckets, self.num_steps, strict=True)
        ]
        summary = (
            f"{len(self.buckets)} programs, {self.waste_percent:.1f}% of what is computed is padding; "
            f"cost {self.cost:.6g}, with a program for each length {self.exact_cost:.6g}"
        )
        return "\n".join([f"{'bucket':>8}  {'steps':>8}", *rows, summary])

    def plot(self, path: str | Path) -> None:
        """Write a bar chart of steps per bucket to an image file; its suffix selects the format.

        Raises:
            TPUValidationError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as cause:
            raise TPUValidationError(
                "plot() needs matplotlib, which is not installed. Try: pip install matplotlib, or print(plan)."
            ) from cause
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        axes.bar([str(size) for size in self.buckets], self.num_steps)
        axes.set(xlabel="padded length", ylabel="steps", title=f"{self.waste_percent:.1f}% padding")
        figure.savefig(path)


def plan_buckets(
    lengths: Iterable[int] | Mapping[int, int],
    max_programs: int = 8,
    *,
    compile_s: float = 0.0,
    step_cost: Callable[[int], float] | None = None,
) -> BucketPlan:
    """The buckets of least total cost: all steps at their padded lengths, plus compiling each bucket.

    Exact, by dynamic programming over the distinct lengths (the one-dimensional k-median with one-sided assignment;
    O(n^2 * max_programs) for n distinct lengths). Buckets are lengths that occur, which is optimal if a longer step
    never costs less.

    Args:
        lengths: All lengths of the data, with repetitions, or a dict from length to count.
        max_programs: The maximum number of buckets.
        compile_s: Cost of one more program, in the unit of `step_cost`: seconds, if that returns seconds.
        step_cost: Padded length -> cost of one step. By default the length itself: then the cost counts padded
            elements.

    Raises:
        TPUValidationError: No lengths, a length below 1, a count below 0, max_programs below 1, or an invalid cost.
    """
    sizes, counts = _histogram(lengths)
    if isinstance(max_programs, bool) or not isinstance(max_programs, int) or max_programs < 1:
        raise TPUValidationError(f"max_programs={max_programs!r} is invalid. Allowed: an int >= 1")
    compile_s = _checked_cost("compile_s", compile_s)
    if not (step_cost is None or callable(step_cost)):
        raise TPUValidationError(f"step_cost={step_cost!r} is invalid. Allowed: None or a function of the length")
    cost_of = np.array([float(size) if step_cost is None else _cost_at(step_cost, size) for size in sizes.tolist()])
    ends = _best_ends(cost_of, counts, min(max_programs, len(sizes)), compile_s)
    starts = [0, *(end + 1 for end in ends[:-1])]
    steps = [int(counts[a : b + 1].sum()) for a, b in zip(starts, ends, strict=True)]
    padded = sum(n * int(sizes[end]) for n, end in zip(steps, ends, strict=True))
    return BucketPlan(
        buckets=tuple(int(sizes[end]) for end in ends),
        num_steps=tuple(steps),
        waste_percent=100 * (1 - float((sizes * counts).sum()) / padded),
        cost=sum(n * float(cost_of[end]) for n, end in zip(steps, ends, strict=True)) + compile_s * len(ends),
        exact_cost=float((cost_of * counts).sum()) + compile_s * len(sizes),
    )


def _cost_at(step_cost: Callable[[int], float], size: int) -> float:
    return _checked_cost(f"step_cost({size})", step_cost(size))


def _checked_cost(what: str, cost: object) -> float:
    if isinstance(cost, numbers.Real) and 0 <= float(cost) < math.inf:
        return float(cost)
    raise TPUValidationError(f"{what}={cost!r} is invalid. Allowed: a number >= 0")


def _histogram(lengths: Iterable[int] | Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct lengths in increasing order, and the count of each."""
    if not isinstance(lengths, Iterable):
        raise TPUValidationError(f"lengths={lengths!r} is invalid. Allowed: a list of ints, or a dict length -> count")
    given = lengths if isinstance(lengths, Mapping) else Counter(map(_checked_length, lengths))
    found: Counter[int] = Counter()
    for n, count in given.items():
        if count < 0:
            raise TPUValidationError("the count of a length is negative. Allowed: counts >= 0")
        found[_checked_length(n)] += int(count)
    present = sorted((n, count) for n, count in found.items() if count)
    if not present:
        raise TPUValidationError("lengths is empty. Try: pass all lengths of your data, with repetitions")
    sizes, counts = zip(*present, strict=True)
    return np.array(sizes), np.array(counts)


def _checked_length(length: Any) -> int:
    """A length as an int: equal elements of a tensor are different keys of a dict."""
    try:
        number = 0 if isinstance(length, bool) else operator.index(length)
    except TypeError:
        number = 0
    if number < 1:
        raise TPUValidationError(f"a length is {length!r:.80}, which is invalid. Allowed: ints >= 1")
    return number


def _best_ends(cost_of: np.ndarray, counts: np.ndarray, most: int, compile_s: float) -> list[int]:
    """Indices of the lengths that are buckets: the partition of least cost into at most `most` runs."""
    n = len(cost_of)
    before = np.concatenate([[0], np.cumsum(counts)])
    best = np.full((most + 1, n + 1), np.inf)
    choice = np.zeros((most + 1, n + 1), dtype=int)
    best[0, 0] = 0.0
    for k in range(1, most + 1):
        for end in range(1, n + 1):
            candidates = best[k - 1, :end] + (before[end] - before[:end]) * cost_of[end - 1]
            choice[k, end] = int(candidates.argmin())
            best[k, end] = candidates[choice[k, end]] + compile_s
    k = int(best[:, n].argmin())
    ends: list[int] = []
    end = n
    while end:
        ends.append(end - 1)
        end, k = int(choice[k, end]), k - 1
    return ends[::-1]
