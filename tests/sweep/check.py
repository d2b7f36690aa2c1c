"""One operator, compiled, against eager: right, wrong, or it raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch_xla  # noqa: F401 - makes the device "xla" known, which openxla's arguments are on
from torch._dynamo.utils import counters

from tests.sweep.compare import mismatch, shape_mismatch, statistics_mismatch
from tests.sweep.properties import ONLY_SHAPES, RANDOM, UP_TO_SIGN
from tests.sweep.samples import Call, calls

Status = Literal["right", "wrong", "raises", "crash"]


@dataclass(frozen=True)
class Outcome:
    """What became of an operator's samples.

    Attributes:
        name: The operator.
        status: That of its worst sample; "crash" is given by whoever watches the process.
        text: What was wrong, or the error.
        graphs: Graphs that the backend was given; 0 where Dynamo itself leaves the operator to eager.
        seconds: Time it took.
        kinds: With extremes, the kinds of values that are not right.
    """

    name: str
    status: Status
    text: str = ""
    graphs: int = 0
    seconds: float = 0.0
    kinds: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """The backend under test, its options, and where its arguments lie."""

    backend: str
    device: str = "cpu"
    options: tuple[tuple[str, object], ...] = ()

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` through the backend, from a Dynamo that has seen nothing."""
        torch._dynamo.reset()
        return torch.compile(fn, backend=self.backend, options=dict(self.options) or None, dynamic=False)


SUBJECTS = {
    # Exact products, so that what differs from eager is an error and not a rounding that was asked for.
    "kp_tpu": Subject("kp_tpu", options=(("precision", "float32"), ("matmul_precision", "highest"))),
    "openxla": Subject("openxla", device="xla"),
    "eager": Subject("eager"),
}


def check(name: str, subject: Subject) -> Outcome:
    """Compare each sample of an operator; the first that is not right decides."""
    counters.clear()
    start = time.perf_counter()
    outcome = Outcome(name, "right")
    for index, pair in enumerate(zip(calls(name), calls(name), strict=True)):
        try:
            problem = _problem(*pair, subject)
        except Exception as error:  # noqa: BLE001 - an operator may raise anything, and the message is the result
            outcome = Outcome(name, "raises", f"sample {index}: {message(error)}")
            break
        if problem:
            outcome = Outcome(name, "wrong", f"sample {index}: {problem}")
            break
    return replace(outcome, graphs=counters["stats"]["unique_graphs"], seconds=time.perf_counter() - start)


def _problem(call: Call, again: Call, subject: Subject) -> str | None:
    """What is wrong with one sample, given twice because a call may overwrite its arguments."""
    name, compiled = call.op.full_name, subject.compile(call.target())
    exact, theirs = call.copy().in_float64(), again.mapped(lambda t: t.to(subject.device))
    if name in RANDOM:
        return statistics_mismatch(lambda: theirs.copy().run(compiled), lambda: call.copy().run())
    if name in ONLY_SHAPES:
        return shape_mismatch(theirs.run(compiled), call.run())
    if name in UP_TO_SIGN:
        unique = UP_TO_SIGN[name]
        return mismatch(unique(theirs.run(compiled)[0]), unique(call.run()[0]), lambda: unique(exact.run()[0]))
    return mismatch(theirs.run(compiled), call.run(), exact.run)


def message(error: BaseException) -> str:
    """An error in one short line."""
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]
