"""Whether what a compiled program shows is right: values against float64, all else against eager.

Values, tensor by tensor, are norms of differences to a run in float64. Float32 programs may be off by `FLOAT32` of
the norm, bfloat16 ones by `AUTOCAST` times what eager autocast is off. Where the tensor is so small, or the program
so ill conditioned, that rounding explains more, the bound is `SAFETY` times the largest of what eager float32 and
six runs of `rounding.Jitter` are off. What is above that is looked at again with more runs (`RUNS`): two bfloat16
numbers that differ by one rounding are equal in one run of fifty, and `maximum` then halves its gradient. The factor
covers that the largest of a few draws may be small by luck: for a normal distribution the largest of 6 is below a
fifth of the deviation once in 60,000 tensors, and the difference must be above 1.6 deviations besides; and that a
fused operator rounds inside as well.

Integers and booleans are eager's. Where they hang on a comparison of rounded numbers that rounding turns, as many
elements may differ as in those runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.hunt.observe import Observation, Seen

FLOAT32 = 1e-5
AUTOCAST = 1.1
SAFETY = 8.0
RUNS = (6, 24, 240)
# Smallest normal number of float32: below, XLA has zero, and a chain of operators multiplies that.
_TINY = 2.0**-126


@dataclass
class References:
    """Eager runs of a program, made when they are asked for.

    Attributes:
        exact: In float64.
        eager: As the program is.
        autocast: Under torch's autocast to bfloat16; None where it raises or nothing is cast.
        jittered: By number, as `rounding.Jitter` moves it.
    """

    exact: Observation
    eager: Observation
    autocast: Callable[[], Observation | None]
    jittered: Callable[[int], Observation]
    _runs: list[Observation] = field(default_factory=list)
    _cast: list[Observation | None] = field(default_factory=list)

    def rounded(self, count: int) -> list[Observation]:
        while len(self._runs) < count:
            self._runs.append(self.jittered(len(self._runs)))
        return self._runs[:count]

    def cast(self) -> Observation | None:
        if not self._cast:
            self._cast.append(self.autocast())
        return self._cast[0]


def differences(mine: Observation, references: References) -> list[str]:
    """What is wrong with `mine`, one line each; empty where nothing is."""
    eager = references.eager
    found = []
    for name, expected in eager.items():
        if name not in mine:
            continue
        text = _difference(name, mine[name], expected, references)
        if text is not None:
            found.append(f"{name}: {text}")
    return found + [f"{name}: only one of eager and compiled has it" for name in sorted(mine.keys() ^ eager.keys())]


def _difference(name: str, mine: Any, eager: Any, references: References) -> str | None:
    if not isinstance(eager, Seen) or not isinstance(mine, Seen):
        return (
            None if type(mine) is type(eager) and _same(mine, eager) else f"{_short(mine)}, eager has {_short(eager)}"
        )
    return _other_form(mine, eager) or _other_values(name, mine, references)


def _same(mine: Any, eager: Any) -> bool:
    return mine == eager or (isinstance(eager, float) and abs(mine - eager) <= FLOAT32 * abs(eager))


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, Seen) else repr(value)


def _other_form(mine: Seen, eager: Seen) -> str | None:
    """Another dtype, shape, layout, sharing of memory, need of a gradient."""
    if (mine.value.dtype, mine.value.shape) != (eager.value.dtype, eager.value.shape):
        return f"{_form(mine)}, eager has {_form(eager)}"
    if mine.requires_grad != eager.requires_grad:
        return f"requires_grad={mine.requires_grad}, eager has {eager.requires_grad}"
    if mine.stride is None or not mine.value.numel():
        return None
    if mine.shares != eager.shares:
        return f"shares memory with {mine.shares or 'nothing'}, eager's with {eager.shares or 'nothing'}"
    if _strides(mine) != _strides(eager):
        return f"strides {mine.stride}, eager's {eager.stride}"
    if mine.offsets != eager.offsets:
        return f"starts {mine.offsets} elements behind {eager.shares}, eager's {eager.offsets}"
    return None


def _form(seen: Seen) -> str:
    return f"{str(seen.value.dtype).removeprefix('torch.')}{list(seen.value.shape)}"


def _strides(seen: Seen) -> list[int]:
    """Those that say something: where a dimension has one element, any stride is right."""
    assert seen.stride is not None
    return [step for step, size in zip(seen.stride, seen.value.shape, strict=True) if size > 1]


def _other_values(name: str, mine: Seen, references: References) -> str | None:
    if not (mine.value.is_floating_point() or mine.value.is_complex()):
        return _other_integers(name, mine.value, references)
    found, eager = _real(mine.value), _real(references.eager[name].value)
    # Where float64 has no such gradient, as nothing that wants one is left of its promotion, eager's is exact.
    reference = references.exact.get(name)
    exact = _real(reference.value if isinstance(reference, Seen) else references.eager[name].value)
    # Kernels of float32 and float64 differ in what they give for infinities; either will do.
    if not ((_kinds(found) == _kinds(eager)) | (_kinds(found) == _kinds(exact))).all():
        return _other_kinds(name, found, eager, references)
    finite = eager.isfinite() & exact.isfinite() & found.isfinite()
    norm = exact[finite].norm().item()
    error = (found - exact)[finite].norm().item()
    base = FLOAT32 * norm + _TINY * max(found.numel(), 1)
    if error <= base or error <= SAFETY * (_error(eager, exact, finite)):
        return None
    cast = references.cast()
    if cast is not None and error <= AUTOCAST * _error(_real(_value(cast, name, exact)), exact, finite):
        return None
    for count in RUNS:
        explained = max(_error(_real(_value(run, name, exact)), exact, finite) for run in references.rounded(count))
        if error <= SAFETY * explained:
            return None
    return f"off by {error:.2g} of {norm:.2g} ({error / max(norm, 1e-300):.1e}), rounding explains {explained:.1e}"


def _value(run: Observation, name: str, like: torch.Tensor) -> torch.Tensor:
    seen = run.get(name)
    return seen.value if isinstance(seen, Seen) and seen.value.numel() == like.numel() else torch.zeros_like(like)


def _error(found: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor) -> float:
    error = (found.reshape(exact.shape) - exact)[finite].norm().item()
    return error if error == error else float("inf")


def _real(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _kinds(value: torch.Tensor) -> torch.Tensor:
    """0 for a number, else which of infinity, minus infinity and NaN."""
    return value.isposinf() * 1 + value.isneginf() * 2 + value.isnan() * 3


def _other_kinds(name: str, found: torch.Tensor, eager: torch.Tensor, references: References) -> str | None:
    wrong = _kinds(found) != _kinds(eager)
    runs = [_real(_value(run, name, eager)).reshape(eager.shape) for run in references.rounded(RUNS[0])]
    if any((_kinds(run) != _kinds(eager)).sum() >= wrong.sum() for run in runs):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} not finite as eager's are: at {place} {found[place]}, eager {eager[place]}"


def _other_integers(name: str, found: torch.Tensor, references: References) -> str | None:
    eager = references.eager[name].value
    wrong = int((found != eager).sum())
    if wrong == 0:
        return None
    for count in RUNS:
        for run in [references.exact, *references.rounded(count)]:
            if (_value(run, name, eager).reshape(eager.shape) != eager).sum() * SAFETY >= wrong:
                return None
    place = tuple((found != eager).nonzero()[0].tolist())
    return f"{wrong} of {eager.numel()} differ: at {place} {found[place]}, eager {eager[place]}"
