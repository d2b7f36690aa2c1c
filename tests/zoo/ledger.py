"""What the option `ledger` measures on a model of the zoo: the pass that errs most, and what is taken back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import kp_dynamo
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.passes.base import PassErrors, PassReport
from kp_dynamo.runtime.events import GraphTransformed
from kp_dynamo.session import Session
from tests.zoo.harness import RUNS, Setting
from tests.zoo.models import ZooModel

TITLE = "## The ledger"
PREAMBLE = f"""\
{TITLE}

With `options={{"ledger": True}}` the backend measures every pass on the model's inputs, at level balanced: the error of
results and gradients against the captured graph in float64, whose bound is that of [correctness](correctness.md). The
table has the largest error of any pass as a multiple of its bound, and that pass. A pass above 1 is taken back: the
graph is then compiled without it. A pass is measured if it changed a graph whose inputs are known when it is compiled;
those of a backward graph are not.
"""


def reports_of(run: str, model: ZooModel) -> list[PassReport]:
    """The reports of all passes on all graphs of a run."""
    found: list[PassReport] = []

    def observe(event: object) -> None:
        if isinstance(event, GraphTransformed):
            found.extend(event.reports)

    torch._dynamo.reset()
    kp_dynamo.clear_cache()
    backend: Any = Session(observe=observe).as_backend(CompileOptions(ledger=True))
    RUNS[run](model, Setting(backend=backend))
    return found


def ledger_row(name: str, run: str, reports: Iterable[PassReport]) -> dict[str, str]:
    """The row of a model: how many changes were measured, the largest of their errors, and what was taken back."""
    measured = [(r.name, r.errors) for r in reports if r.errors is not None and list(_multiples(r.errors))]
    largest, by = max(((max(_multiples(errors)), name) for name, errors in measured), default=(0.0, "-"))
    taken_back = [r.name for r in reports if r.errors is not None and r.errors.is_taken_back]
    return {
        "model": name,
        "run": run,
        "measured": str(len(measured)),
        "largest error / bound": f"{largest:.2f}" if measured else "-",
        "by": by if largest else "-",
        "taken back": ", ".join(dict.fromkeys(taken_back)) or "none",
    }


def _multiples(errors: PassErrors) -> Iterator[float]:
    """The errors against float64 as multiples of their bounds."""
    pairs = ((errors.exact.results, errors.bound.results), (errors.exact.gradients, errors.bound.gradients))
    for error, bound in pairs:
        if error is not None and bound is not None:
            yield error / bound if bound else (math.inf if error else 0.0)
