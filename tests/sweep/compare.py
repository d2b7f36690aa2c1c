"""When a compiled operator's answer is eager's: equal up to rounding, or equal in distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# torch's own allowance for float32: eleven ulp, or the rounding of numbers near one that cancel.
_RTOL, _ATOL = 1.3e-6, 1e-5
# Where eager's own error is larger than that (long sums, linear algebra), as many times eager's.
_EAGER_ERRORS = 8.0
# Draws of eager that estimate a statistic and its spread, and compiled draws that are held against them.
_EAGER_DRAWS, _COMPILED_DRAWS = 64, 8
# Normal deviates: one false alarm in 5e8 comparisons.
_SIGMAS = 6.0


def mismatch(got: Any, wanted: Any, exact: Callable[[], Any]) -> str | None:
    """What is wrong with `got`; None when it is `wanted` in structure, dtype, shape and values.

    Args:
        got: The compiled result.
        wanted: Eager's, in float32.
        exact: Eager's in float64, which says how far eager's own rounding took it. Asked for only when
            torch's own allowance does not do.
    """
    ours, eager = _leaves(got), _leaves(wanted)
    problem = _first_difference(ours, eager, [_ATOL] * len(eager))
    if problem is None or not any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in eager):
        return problem
    try:
        allowances = [_eager_error(e, x) for e, x in zip(eager, _leaves(exact()), strict=True)]
    except (RuntimeError, TypeError, ValueError):  # there is no such operator in float64
        return problem
    return _first_difference(ours, eager, allowances)


def extreme_mismatch(got: Any, *references: tuple[Any, Any]) -> str | None:
    """As `mismatch`, each element of a float one of what eager has in float32 and in float64, signs of zeros aside.

    The parts of a complex number are elements.

    Args:
        got: The compiled result.
        references: Pairs of eager's results in float32 and in float64, any of which will do.
    """
    ours, columns = _leaves(got), [[_leaves(tree) for tree in pair] for pair in references]
    if any(len(leaves) != len(ours) for pair in columns for leaves in pair):
        return f"{len(ours)} results where eager gives {len(columns[0][0])}"
    for position, mine in enumerate(ours):
        if problem := _extreme_difference(mine, [(pair[0][position], pair[1][position]) for pair in columns]):
            return f"result {position}: {problem}"
    return None


def inexact(got: Any, eager: Any, exact: Any) -> str | None:
    """Where eager's float32 is its float64 to the last bit, and `got` is not."""
    columns = [_leaves(tree) for tree in (got, eager, exact)]
    if len(columns[0]) != len(columns[1]):
        return f"{len(columns[0])} results where eager gives {len(columns[1])}"
    for position, (mine, single, double) in enumerate(zip(*columns, strict=True)):
        if not isinstance(single, torch.Tensor) or single.dtype is not torch.float32 or mine.shape != single.shape:
            continue
        places = (single.double() == double) & single.isfinite() & (mine != single)
        if places.any():
            first = mine[places][0].item(), single[places][0].item()
            return f"result {position}: {int(places.sum())} not exact: {first[0]} where eager has {first[1]}"
    return None


def _extreme_difference(got: Any, references: list[tuple[Any, Any]]) -> str | None:
    eager, exact = references[0]
    is_tensor = isinstance(eager, torch.Tensor) and isinstance(got, torch.Tensor)
    if is_tensor and eager.is_complex() and got.dtype == eager.dtype:
        mine, *parts = (torch.view_as_real(t) for t in (got, *(t for pair in references for t in pair)))
        return _extreme_difference(mine, list(zip(parts[::2], parts[1::2], strict=True)))
    if not is_tensor or not eager.dtype.is_floating_point or got.dtype != eager.dtype or got.shape != eager.shape:
        problems = [_first_difference([got], [wanted], [0.0]) for wanted, _ in references]
        return None if None in problems else problems[0]
    is_right = torch.zeros_like(got, dtype=torch.bool)
    for reference in references:
        is_right |= _extremes_right(got, *reference)
    if is_right.all():
        return None
    places = (~is_right).flatten().nonzero().flatten()
    mine, theirs, true = (t.flatten()[places[0]].item() for t in (got, eager, exact))
    return f"{len(places)} of {got.numel()} wrong: {mine} where eager has {theirs}, in float64 {true}"


def _extremes_right(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    rounded = exact.to(eager.dtype)
    error = (eager.double() - exact.double()).abs().nan_to_num(0.0, 0.0, 0.0)
    atol = _ATOL + _EAGER_ERRORS * float(error.max()) if error.numel() else 0.0
    rtol = max(_RTOL, _default_rtol(eager)) * 4
    is_right = got.isclose(eager, rtol, atol, equal_nan=True) | got.isclose(rounded, rtol, atol, equal_nan=True)
    # Out of the range of float32 every order of the same sum overflows in its own way.
    return is_right | (exact.isfinite() & rounded.isinf() & ~got.isfinite())


def shape_mismatch(got: Any, wanted: Any) -> str | None:
    """As `mismatch`, for results whose values nobody promises."""
    zeros = [
        pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), tree)
        for tree in (got, wanted)
    ]
    return _first_difference(_leaves(zeros[0]), _leaves(zeros[1]), [0.0] * len(_leaves(wanted)))


def statistics_mismatch(draw: Callable[[], Any], draw_eager: Callable[[], Any]) -> str | None:
    """Whether random results follow eager's distribution.

    Two bounded statistics of each result, the means of tanh(x) and tanh(|x|) (bounded, so that a Cauchy
    variable has them too): a few compiled draws lie within six standard deviations of eager's mean, both
    estimated from many eager draws. Where eager does not vary (p = 0), neither may we.
    """
    torch.manual_seed(0)
    got = [draw() for _ in range(_COMPILED_DRAWS)]
    wanted = [draw_eager() for _ in range(_EAGER_DRAWS)]
    if problem := shape_mismatch(got[0], wanted[0]):
        return problem
    ours, eager = (torch.stack([_statistics(tree) for tree in drawn]) for drawn in (got, wanted))
    allowed = eager.std(dim=0) * _SIGMAS * (1 / math.sqrt(_COMPILED_DRAWS) + 1 / math.sqrt(_EAGER_DRAWS)) + _ATOL
    distance = (ours.mean(dim=0) - eager.mean(dim=0)).abs()
    if bool((distance <= allowed).all()):
        return None
    return f"means of tanh(x), tanh(|x|) are off by {distance.tolist()}, allowed {allowed.tolist()}"


def _statistics(tree: Any) -> torch.Tensor:
    values = [t.double() for t in _leaves(tree) if isinstance(t, torch.Tensor) and t.numel()]
    means = [m for v in values for m in (v.tanh().mean(), v.abs().tanh().mean())]
    return torch.stack(means) if means else torch.zeros(1, dtype=torch.float64)


def _first_difference(ours: list[Any], eager: list[Any], absolute: list[float]) -> str | None:
    if len(ours) != len(eager):
        return f"{len(ours)} results where eager gives {len(eager)}"
    for position, (got, wanted, atol) in enumerate(zip(ours, eager, absolute, strict=True)):
        is_rounded = isinstance(wanted, torch.Tensor) and (wanted.is_floating_point() or wanted.is_complex())
        tolerance = {"rtol": max(_RTOL, _default_rtol(wanted)), "atol": atol} if is_rounded else {}
        try:
            torch.testing.assert_close(got, wanted, equal_nan=True, **tolerance)
        except AssertionError as difference:
            return f"result {position}: " + " ".join(str(difference).split())
    return None


def _default_rtol(value: torch.Tensor) -> float:
    """Half an ulp or more of what the operator itself rounds to (casts to float16 and bfloat16)."""
    return torch.finfo(value.dtype).eps


def _eager_error(eager: Any, exact: Any) -> float:
    if not isinstance(eager, torch.Tensor) or not eager.is_floating_point() or not eager.numel():
        return _ATOL
    error = (eager.double() - exact.double()).abs().nan_to_num(0.0, 0.0, 0.0).max()
    return max(_ATOL, _EAGER_ERRORS * float(error))


def _leaves(tree: Any) -> list[Any]:
    """Leaves as `assert_close` takes them: dense CPU tensors and Python values, a dtype or a size by its text."""
    return [_leaf(value) for value in pytree.tree_leaves(tree)]


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu()
        return dense.to_dense() if dense.layout != torch.strided else dense.resolve_conj().resolve_neg()
    return value if isinstance(value, (bool, int, float, complex)) else torch.tensor(list(str(value).encode()))
