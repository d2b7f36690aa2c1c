"""An operator's samples again, at the ends of their ranges or of other shapes: results and gradients against eager.

One program serves all kinds of values of a sample. Where eager in float32 and in float64 disagree, either will do:
eager's own vectorized and scalar kernels differ there. Subnormal numbers may count as zero.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from tests.sweep.check import Outcome, Subject, message
from tests.sweep.compare import extreme_mismatch, inexact
from tests.sweep.kinds import FLOATS, INTEGERS, SHAPES, SUBNORMAL, WHOLE, Change, flushed
from tests.sweep.properties import ONLY_SHAPES, RANDOM, SIZED_BY_VALUES, UP_TO_SIGN
from tests.sweep.samples import Call, calls, ops

Changed = Iterator[tuple[str, Call]]

# torch 2.9's own kernels end the process where there are no elements.
_EAGER_ENDS = frozenset({"_chunk_cat", "_segment_reduce.offsets", "nn.functional.pdist"})


def check_floats(name: str, subject: Subject) -> Outcome:
    """The kinds of float32 values at which an operator is not right, and what the first sample differs in."""
    return _checked(name, subject, torch.float32, lambda call: _with_values(call, torch.float32, FLOATS))


def check_integers(name: str, subject: Subject) -> Outcome:
    """The same of int32."""
    kinds = {} if name in SIZED_BY_VALUES else INTEGERS
    return _checked(name, subject, torch.int32, lambda call: _with_values(call, torch.int32, kinds))


def check_whole(name: str, subject: Subject) -> Outcome:
    """The kinds of whole numbers at which an operator rounds where eager does not."""
    return _checked(name, subject, torch.float32, lambda call: _with_values(call, torch.float32, WHOLE), inexact)


def check_shapes(name: str, subject: Subject) -> Outcome:
    """The same of shapes without elements and without dimensions."""
    if name in _EAGER_ENDS:
        return Outcome(name, "right")
    dtype = torch.float32 if ops()[name].supports_dtype(torch.float32, "cpu") else torch.int32
    return _checked(name, subject, dtype, _with_shapes)


def _checked(
    name: str,
    subject: Subject,
    dtype: torch.dtype,
    changed: Callable[[Call], Changed],
    compare: Callable[..., str | None] | None = None,
) -> Outcome:
    counters.clear()
    start = time.perf_counter()
    wrong: dict[str, str] = {}
    if name not in ONLY_SHAPES | RANDOM | set(UP_TO_SIGN) and ops()[name].supports_dtype(dtype, "cpu"):
        for call in calls(name, dtype):
            wrong = {**_wrong_kinds(call, subject, changed, compare), **wrong}
    outcome = Outcome(name, "right" if not wrong else "wrong", " | ".join(f"{k}: {t}" for k, t in wrong.items()))
    return replace(outcome, kinds=sorted(wrong), seconds=time.perf_counter() - start)


def _with_values(call: Call, dtype: torch.dtype, kinds: dict[str, Change]) -> Changed:
    for kind, change in kinds.items():
        change = _of_dense(change)
        yield kind, call.mapped(lambda t, c=change: c(t) if t.dtype is dtype else t.clone())


def _with_shapes(call: Call) -> Changed:
    for kind, (first, others) in SHAPES.items():
        changes = itertools.chain([first], itertools.repeat(others))
        yield kind, call.mapped(lambda t, c=changes: _of_dense(next(c))(t))


def _of_dense(change: Change) -> Change:
    return lambda t: change(t) if t.layout is torch.strided else t.clone()


def _wrong_kinds(
    sample: Call, subject: Subject, changed: Callable[[Call], Changed], compare: Callable[..., str | None] | None
) -> dict[str, str]:
    compiled = subject.compile(sample.target())
    wrong = {}
    for kind, call in changed(sample):
        try:
            references = [_reference(call)]
            if kind == SUBNORMAL:
                references.append(_reference(call.mapped(flushed)))
        except Exception:  # noqa: BLE001 - eager refuses the values, or there is no such operator in float64
            continue
        try:
            mine = run(call, compiled)
            problem = compare(mine, *references[0]) if compare else extreme_mismatch(mine, *references)
        except Exception as error:  # noqa: BLE001 - the message is the result
            problem = "raises " + message(error)
        if problem:
            wrong[kind] = problem
    return wrong


def _reference(call: Call) -> tuple[Any, Any]:
    return run(call.copy(), None), run(call.copy().in_float64(), None)


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
