"""Masks of the true elements, true sizes and true counts, as values of the graph.

The true lengths are inputs of the graph (0-dim int64 tensors), so that one program serves every length up to its size.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from kp_dynamo.passes.padding.atoms import (
    Atoms,
    Padded,
    Refused,
    Size,
    Symbolic,
    expression,
    has_tail,
    is_padded,
    product,
)

Number = torch.Tensor | int | float | bool


class Masks:
    """Makes masks and true sizes while a graph is traced; equal ones are made once.

    Args:
        lengths: Symbol -> true length, a 0-dim int64 tensor.
        sizes: Symbol -> padded length, as the tracer knows it.
    """

    def __init__(
        self, lengths: Mapping[sympy.Symbol, torch.Tensor], sizes: Mapping[sympy.Symbol, torch.SymInt]
    ) -> None:
        self._lengths, self._sizes = lengths, dict(sizes)
        self._computed: dict[sympy.Expr, torch.SymInt] = {}
        self._masks: dict[str, torch.Tensor] = {}
        self._true: dict[str, Number] = {}
        self.num_masked = 0
        self.noted: set[sympy.Expr] = set()

    def note(self, x: Padded) -> None:
        """Record the sizes that depend on lengths: each must be at least its true size."""
        self.noted |= {expression(atom) for atoms in x.dims for atom in (*atoms, product(atoms)) if is_padded(atom)}

    def tracked(self, size: Size) -> Size:
        """A padded size from another trace, in terms of the sizes that this tracer knows."""
        expr = expression(size)
        if not expr.free_symbols:
            return int(expr)
        # A size computed from floats (`int(0.75 * L)`) is found by its expression.
        named = {known: sympy.Dummy(integer=True) for known in self._computed}
        sizes = {**self._sizes, **{name: self._computed[known] for known, name in named.items()}}
        return sympy_interp(PythonReferenceAnalysis, sizes, expr.xreplace(named))  # type: ignore[no-any-return]

    def record_computed(self, size: torch.SymInt) -> None:
        """Record a size that the graph computes."""
        if is_padded(size):
            self._computed[expression(size)] = size

    def true_value(self, size: Any) -> Number:
        """The value of a symbolic number at the true lengths: a 0-dim tensor (int64, float64, bool), or a number."""
        if not isinstance(size, Symbolic):
            return size  # type: ignore[no-any-return]
        return self._evaluated(size.node.expr)

    def _evaluated(self, expr: sympy.Expr) -> Number:
        key = str(expr)
        if key not in self._true:
            self._true[key] = self._evaluate(expr)
        return self._true[key]

    def _evaluate(self, expr: sympy.Expr) -> Number:
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if expr.is_Integer:
            return int(expr)
        if expr.is_Number:
            return float(expr)
        if expr in self._lengths:
            return self._lengths[expr]
        name = "Pow" if expr.is_Pow else expr.func.__name__
        if name not in _FORMS:
            raise Refused(f"the length is used as a value in {expr}, and {name} is unsupported")
        return _FORMS[name](*map(self._evaluated, expr.args))  # type: ignore[no-any-return]

    def true_count(self, x: Padded, dims: Iterable[int]) -> Number:
        """The number of true elements along `dims` together."""
        return functools.reduce(operator.mul, (self.true_value(a) for d in dims for a in x.dims[d]), 1)

    def positions(self, size: Size) -> torch.Tensor:
        """0, 1, ... of a padded size: int64[size]."""
        return torch.arange(size)  # type: ignore[arg-type]

    def is_true(self, atoms: Atoms) -> torch.Tensor:
        """bool[product of atoms]: the true elements of a dimension."""
        key = "|".join(str(expression(a)) for a in atoms)
        if key not in self._masks:
            self._masks[key] = self._mask(atoms)
        return self._masks[key]

    def _mask(self, atoms: Atoms) -> torch.Tensor:
        if len(atoms) == 1:
            return self.positions(atoms[0]) < self.true_value(atoms[0])
        parts = []
        for place, atom in enumerate(atoms):
            if is_padded(atom):
                parts.append(self.is_true((atom,)).view([-1 if i == place else 1 for i in range(len(atoms))]))
        return functools.reduce(torch.logical_and, parts).expand(atoms).reshape(product(atoms))

    def filled(self, x: Padded, dims: Iterable[int], value: float) -> torch.Tensor:
        """`x` with `value` in its tails along `dims`; for an integer dtype, infinities become its min and max."""
        tensor = x.tensor
        for d in sorted({d % len(x.dims) for d in dims} if x.dims else ()):
            if has_tail(x.dims[d]):
                mask = self.is_true(x.dims[d]).view([-1 if i == d else 1 for i in range(len(x.dims))])
                tensor = torch.where(
                    mask, tensor, torch.full((), _representable(value, tensor.dtype), dtype=tensor.dtype)
                )
                self.num_masked += 1
        return tensor

    def cleared(self, x: Padded, value: float = 0) -> torch.Tensor:
        """`x` with `value` in every tail."""
        return self.filled(x, range(len(x.dims)), value)


def _representable(value: float, dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return value > 0
    if dtype.is_floating_point or dtype.is_complex:
        return value
    if math.isinf(value):
        return torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min
    return int(value)


def _wide(x: Number) -> Number:
    return x.to(torch.float64) if isinstance(x, torch.Tensor) else float(x)


def floor_div(x: Number, y: Number) -> Number:
    """Computed in float64, exact below 2^53: torch_xla divides integers as float32."""
    quotient = torch.floor(torch.as_tensor(_wide(x) / _wide(y)))
    return quotient.to(torch.int64)


def _largest(*values: Number) -> Number:
    return functools.reduce(_maximum, values)


def _smallest(*values: Number) -> Number:
    return -_largest(*(-v for v in values))


def _maximum(x: Number, y: Number) -> Number:
    if isinstance(y, torch.Tensor):
        x, y = y, x
    assert isinstance(x, torch.Tensor)
    return torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp_min(x, y)


def _remainder(x: Number, y: Number) -> Number:
    return x - floor_div(x, y) * y


def _power(x: Number, y: Number) -> Number:
    is_small = isinstance(y, int) and y >= 0
    return (x if is_small else _wide(x)) ** y


def _of_float(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Number], Number]:
    return lambda x: function(torch.as_tensor(_wide(x)))


def _to_int(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Number], Number]:
    return lambda x: function(torch.as_tensor(_wide(x))).to(torch.int64)


def _logical(function: Callable[..., torch.Tensor]) -> Callable[..., Number]:
    return lambda *xs: functools.reduce(function, map(torch.as_tensor, xs))


# Function of torch's symbolic sizes -> the same function of tensors.
_FORMS: dict[str, Any] = {
    "Add": lambda *xs: functools.reduce(operator.add, xs),
    "Mul": lambda *xs: functools.reduce(operator.mul, xs),
    "Pow": _power,
    "PowByNatural": _power,
    "FloatPow": _power,
    "FloorDiv": floor_div,
    "CleanDiv": floor_div,
    "Mod": _remainder,
    "PythonMod": _remainder,
    "Max": _largest,
    "Min": _smallest,
    "ToFloat": _wide,
    "IntTrueDiv": lambda x, y: _wide(x) / _wide(y),
    "FloatTrueDiv": lambda x, y: _wide(x) / _wide(y),
    "FloorToInt": _to_int(torch.floor),
    "CeilToInt": _to_int(torch.ceil),
    "TruncToInt": _to_int(torch.trunc),
    "RoundToInt": _to_int(torch.round),
    **{f"OpaqueUnaryFn_{f.__name__}": _of_float(f) for f in (torch.sqrt, torch.log, torch.log2, torch.exp, torch.tanh)},
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": _logical(torch.logical_and),
    "Or": _logical(torch.logical_or),
    "Not": lambda x: torch.as_tensor(x).logical_not(),
}
