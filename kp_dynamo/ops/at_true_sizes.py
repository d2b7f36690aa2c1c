"""`kp::at_true_sizes`: run an operator on the CPU, on tensors without the padding of their buckets.

    at_true_sizes(call, operands, true_sizes, padded_sizes) -> results

call          the operator and its non-tensor arguments: JSON, made by `described`;
operands      its tensors, padded;
true_sizes    int64[n]: the sizes of all operands, in their order, then the lengths that are arguments;
padded_sizes  the sizes of all results, in their order; results are zero-padded.

The CPU needs no fixed shapes. XLA has no lowering for this op, so the graph is split around it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "at_true_sizes(str call, Tensor[] operands, Tensor true_sizes, SymInt[] padded_sizes) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def described(
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
) -> str | None:
    """The `call` argument as JSON; None if an argument cannot be serialized.

    Args:
        target: The operator.
        args: Its arguments. A tensor is the next operand, a SymInt the next length.
        kwargs: Its keyword arguments.
        operands: Fake tensors with the strides that autograd saw: a backward expects the LU of a matrix, or of its
            transpose.
        results: Fake tensors of its results.
    """
    numbers, lengths = itertools.count(), itertools.count()

    def text(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"operand": next(numbers)}
        if isinstance(value, torch.SymInt):
            return {"length": next(lengths)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)):
            return [text(v) for v in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError

    kinds = [[str(r.dtype).removeprefix("torch."), _order(r)] for r in results]
    try:
        given = {"args": [text(a) for a in args], "kwargs": {k: text(v) for k, v in kwargs.items()}}
    except TypeError:
        return None
    return json.dumps({"operator": str(target), **given, "orders": list(map(_order, operands)), "results": kinds})


def _order(x: Tensor) -> list[int]:
    """The dimensions, from outermost to innermost in memory."""
    return sorted(range(x.dim()), key=lambda d: -_hint(x.stride(d)))


def _hint(step: Any) -> int:
    return int(step.node.hint) if isinstance(step, torch.SymInt) else int(step)


def name_of(node: fx.Node) -> str:
    """The operator that a node calls, such as aten.mode.default; for `kp::at_true_sizes`, the wrapped operator."""
    if node.target is not torch.ops.kp.at_true_sizes.default:
        return str(node.target)
    return str(json.loads(str(node.args[0]))["operator"])


def _on_cpu(call: str, operands: list[Tensor], true_sizes: Tensor, padded_sizes: list[int]) -> list[Tensor]:
    what, sizes = json.loads(call), iter(true_sizes.tolist())
    true = [x[tuple(slice(next(sizes)) for _ in range(x.dim()))] for x in operands]
    given = [_laid_out(x, order) for x, order in zip(true, what["orders"], strict=True)], list(sizes)
    named = {name: _filled(value, *given) for name, value in what["kwargs"].items()}
    results = _operator(what["operator"])(*_filled(what["args"], *given), **named)
    shapes = _shapes(what["results"], padded_sizes)
    every = [results] if isinstance(results, Tensor) else results
    return [_laid_out(_padded(result, shape), order) for result, (shape, order, _) in zip(every, shapes, strict=True)]


def _laid_out(x: Tensor, order: list[int]) -> Tensor:
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def _operator(name: str) -> Callable[..., Any]:
    namespace, packet, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def _filled(given: Any, operands: list[Tensor], lengths: list[int]) -> Any:
    if isinstance(given, list):
        return [_filled(value, operands, lengths) for value in given]
    if not isinstance(given, dict):
        return given
    for kind, value in given.items():
        if kind == "operand":
            return operands[value]
        if kind == "length":
            return lengths[value]
        if kind == "dtype":
            return getattr(torch, value)
    raise AssertionError(given)


def _shapes(kinds: list[Any], sizes: Sequence[Any]) -> list[tuple[list[Any], list[int], torch.dtype]]:
    left = iter(sizes)
    return [([next(left) for _ in order], order, getattr(torch, dtype)) for dtype, order in kinds]


def _padded(result: Tensor, shape: Sequence[int]) -> Tensor:
    pads = [pair for size, full in zip(result.shape, shape, strict=True) for pair in (full - size, 0)]
    return F.pad(result.resolve_conj().resolve_neg(), pads[::-1])


def _fake(call: str, operands: list[Tensor], true_sizes: Tensor, padded_sizes: list[Any]) -> list[Tensor]:
    shapes = _shapes(json.loads(call)["results"], padded_sizes)
    return [torch.empty_permuted(shape, order, dtype=dtype, device=true_sizes.device) for shape, order, dtype in shapes]


_library.impl("at_true_sizes", _on_cpu, "CPU")
torch.library.register_fake("kp::at_true_sizes", _fake, lib=_library)
