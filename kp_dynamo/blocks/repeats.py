"""Finds repeated stretches in a sequence of numbers."""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

_MAX_PERIODS = 48
"""Periods that are tried. A true period is a distance between equal operators for every operator of a block, so it is
among the most frequent distances."""
_MAX_OCCURRENCES = 8
"""How often every operator of a block may occur in it."""


class Run(NamedTuple):
    """A stretch in which every number equals the one `period` later.

    Attributes:
        start: Position of its first number.
        stop: Position after its last.
        period: Length of what is repeated.
    """

    start: int
    stop: int
    period: int


def runs(ids: Sequence[int], least: int) -> list[Run]:
    """Runs of at least `least` periods: those that cover most first, of these the shorter periods first."""
    found = [run for period in _periods(ids) for run in _runs_of(ids, period) if run.stop - run.start >= least * period]
    return sorted(found, key=lambda run: (run.start - run.stop, run.period))


def _periods(ids: Sequence[int]) -> list[int]:
    earlier: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_MAX_OCCURRENCES))
    distances: Counter[int] = Counter()
    for position, number in enumerate(ids):
        distances.update(position - other for other in earlier[number])
        earlier[number].append(position)
    return [period for period, _ in distances.most_common(_MAX_PERIODS)]


def _runs_of(ids: Sequence[int], period: int) -> list[Run]:
    found, position = [], 0
    for is_equal, group in itertools.groupby(map(operator.eq, ids, ids[period:])):
        length = len(list(group))
        if is_equal:
            found.append(Run(position, position + length + period, period))
        position += length
    return found
