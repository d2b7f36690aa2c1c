"""An operator's samples again, with floats at the ends of their range: results and gradients against eager.

One program serves all kinds of values of a sample. Where eager in float32 and in float64 disagree, either will do:
eager's own vectorized and scalar kernels differ there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from tests.sweep.check import Outcome, Subject, message
from tests.sweep.compare import extreme_mismatch
from tests.sweep.properties import ONLY_SHAPES, RANDOM, UP_TO_SIGN
from tests.sweep.samples import Call, calls


def _placed(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every fifth element becomes `value`, or the only one."""

    def change(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.numel()).reshape(x.shape) * 7 % 5 == (3 if x.numel() > 4 else 0)
        return torch.where(places, value, x)

    return change


# Squares of the huge and the tiny are in the range of float32: eager accumulates many of them in float64.
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inf": _placed(float("inf")),
    "-inf": _placed(float("-inf")),
    "nan": _placed(float("nan")),
    "zero": _placed(0.0),
    "huge": lambda x: x * 1e12,
    "tiny": lambda x: x * 1e-12,
    "mean": lambda x: x + 1000,
}


def check_extremes(name: str, subject: Subject) -> Outcome:
    """All kinds of values for each sample: which of them are not right, and what the first differs in."""
    counters.clear()
    start = time.perf_counter()
    wrong: dict[str, str] = {}
    if name not in ONLY_SHAPES | RANDOM | set(UP_TO_SIGN):
        for index in range(len(calls(name))):
            wrong = {**_wrong_kinds(name, index, subject), **wrong}
    outcome = Outcome(name, "right" if not wrong else "wrong", " | ".join(f"{k}: {t}" for k, t in wrong.items()))
    return replace(outcome, kinds=sorted(wrong), seconds=time.perf_counter() - start)


def _wrong_kinds(name: str, index: int, subject: Subject) -> dict[str, str]:
    compiled = subject.compile(calls(name)[index].target())
    wrong = {}
    for kind, change in KINDS.items():
        try:
            call = calls(name)[index].mapped(lambda t, c=change: c(t) if t.dtype is torch.float32 else t)
            eager = run(call.copy(), None)
            exact = run(call.copy().in_float64(), None)
        except Exception:  # noqa: BLE001 - eager refuses the values, or there is no such operator in float64
            continue
        try:
            problem = extreme_mismatch(run(call, compiled), eager, exact)
        except Exception as error:  # noqa: BLE001 - the message is the result
            problem = "raises " + message(error)
        if problem:
            wrong[kind] = problem
    return wrong


def run(call: Call, through: Callable[..., Any] | None) -> Any:
    """The result, the arguments after the call, and the gradients by them where there are any."""
    if not call.op.supports_autograd:
        return call.run(through)
    leaves = [t for t in pytree.tree_leaves((call.args, call.kwargs)) if _is_float(t)]
    wanted = {id(t): t.detach().requires_grad_() for t in leaves}
    # Not the leaves themselves, which an operator that writes to its arguments may not change.
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: wanted[id(t)].clone() if id(t) in wanted else t, (call.args, call.kwargs)
    )
    result = (through or call.op.op)(*args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(result) if _is_float(t) and t.requires_grad]
    if not outputs:
        return result, []
    ones = [torch.full_like(t, 0.5) for t in outputs]
    return result, torch.autograd.grad(outputs, list(wanted.values()), ones, allow_unused=True)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
