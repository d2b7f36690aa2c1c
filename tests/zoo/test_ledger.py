"""The ledger's table of docs/zoo.md: the row of a model, and that a pass within its bounds is not taken back."""

from __future__ import annotations

import pytest

from kp_dynamo.passes.base import Errors, PassErrors, PassReport
from tests.zoo.__main__ import documented_ledger
from tests.zoo.ledger import ledger_row, reports_of
from tests.zoo.models import BY_NAME

# As in test_zoo.py: Dynamo (2.9) makes an instance of torch's own autograd.Function where a mask is vmapped.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

BOUND = Errors(0.01, 0.02)


def report(name: str, exact: Errors, *, is_taken_back: bool = False) -> PassReport:
    return PassReport(name, 1, errors=PassErrors(exact=exact, bound=BOUND, is_taken_back=is_taken_back))


def test_the_largest_error_is_that_of_results_or_gradients_as_a_multiple_of_its_bound():
    reports = [
        report("one", Errors(0.004, None)),
        report("two", Errors(0.001, 0.018)),
        report("three", Errors(0.03, 0.001), is_taken_back=True),
        PassReport("unchanged", 0, errors=PassErrors(reason="the graph is unchanged")),
    ]
    row = ledger_row("llama", "train", reports[:2])
    assert row == {
        "model": "llama", "run": "train", "measured": "2", "largest error / bound": "0.90", "by": "two",
        "taken back": "none",
    }  # fmt: skip
    row = ledger_row("llama", "train", reports)
    assert list(row.values())[2:] == ["3", "3.00", "three", "three"]
    assert ledger_row("llama", "train", reports[3:])["largest error / bound"] == "-"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "run"), [("llama", "infer")])
def test_no_pass_exceeds_its_bound_and_some_are_measured(name, run):
    row = ledger_row(name, run, reports_of(run, BY_NAME[name]))
    assert row["taken back"] == "none"
    assert int(row["measured"]) >= 2
    assert 0 < float(row["largest error / bound"]) <= 1
    assert documented_ledger()[name, run]["measured"] == row["measured"]
