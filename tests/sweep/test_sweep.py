"""Torch's own operator samples through the backend: each right, or on the short list of refusals.

`make test` checks every tenth operator, and a few at extremes. `make test-all` checks all of them, also at extremes:
floats and integers at the ends of their ranges, whole numbers, which may not be rounded where eager does not, and
shapes without elements or dimensions. Each runs in a child process, so that an operator that kills it is one failed
test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sweep.known_extremes import KNOWN_EXTREMES
from tests.sweep.known_failures import KNOWN_FAILURES, LONGEST
from tests.sweep.samples import ops
from tests.sweep.worker import CHECKS, Worker

SLICE = 10
# Of each kind of operator one, for `make test`.
QUICK_EXTREMES = {
    "floats": {"logsumexp", "floor_divide", "remainder", "nn.functional.layer_norm", "cummax"},
    "integers": {"pow", "bitwise_right_shift"},
    "whole": {"mean", "true_divide", "nn.functional.avg_pool2d", "std"},
    "shapes": {"logsumexp", "index_select"},
}


def _parameters() -> list[object]:
    names = list(ops())
    return [pytest.param(n, marks=[pytest.mark.slow] if i % SLICE else []) for i, n in enumerate(names)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker("kp_tpu")
    yield worker
    worker.close()


@pytest.mark.parametrize("name", _parameters())
def test_operator_is_right_or_refused(name: str, worker: Worker) -> None:
    outcome = worker.check(name)
    if name in KNOWN_FAILURES:
        assert outcome.status == "raises", f"{name} is on the list of refusals: {outcome}"
        assert KNOWN_FAILURES[name].message in outcome.text
    else:
        assert outcome.status == "right", outcome.text


def _extremes() -> list[object]:
    pairs = [(what, n) for what in CHECKS for n in ops()]
    return [pytest.param(w, n, marks=[] if n in QUICK_EXTREMES[w] else [pytest.mark.slow]) for w, n in pairs]


@pytest.mark.parametrize(("what", "name"), _extremes())
def test_operator_is_right_at_extremes(what: str, name: str, worker: Worker) -> None:
    outcome = worker.check(f"{what} of {name}")
    if name in KNOWN_EXTREMES[what]:
        known = KNOWN_EXTREMES[what][name]
        assert known.explains(frozenset(outcome.kinds)), f"{sorted(outcome.kinds)}, known: {known}. {outcome.text}"
    else:
        assert outcome.status == "right", outcome.text


def test_known_failures_are_few_and_exist() -> None:
    assert len(KNOWN_FAILURES) <= LONGEST
    known = [KNOWN_FAILURES, *KNOWN_EXTREMES.values(), *QUICK_EXTREMES.values()]
    assert set().union(*known) <= set(ops())
