"""The atoms of a dimension of a padded tensor.

A dimension is a row-major product of *atoms*: `view(B * L, D)` makes one dimension of the atoms (B, L). An atom is an
int, or a symbolic size that contains a padded length; then the elements after its true size are the tail. Atoms of
size 1 are omitted. This module compares symbolic sizes as expressions: comparing them by value would add guards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from kp_dynamo.passes.base import Refusal

Size = int | torch.SymInt
Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
Atoms = tuple[Size, ...]
Dims = tuple[Atoms, ...]


class Refused(Exception):
    """No rule makes a call correct at a padded size; the reason names the missing rule.

    Ends a retrace. A rule does not know its node: the interpreter adds it. `MaskPadding` catches the exception and
    reports its `refusal`.
    """

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node

    @property
    def refusal(self) -> Refusal:
        assert self.node is not None, "it has left the interpreter, which adds the node"
        return Refusal(self.node, self.reason)


@dataclass(frozen=True)
class Padded:
    """A traced tensor and the atoms of its dimensions."""

    tensor: torch.Tensor
    dims: Dims

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def replaced(self, tensor: torch.Tensor) -> Padded:
        """Another tensor of the same dimensions."""
        return Padded(tensor, self.dims)


def expression(size: Size | Symbolic) -> sympy.Expr:
    """The expression of a size or number, as far as it is known yet."""
    return size.node.expr if isinstance(size, Symbolic) else sympy.Integer(size)


def is_padded(size: Size | Symbolic) -> bool:
    """Whether a size or number depends on a length. Every symbol of an accepted graph is a length."""
    return bool(expression(size).free_symbols)


def has_tail(atoms: Atoms) -> bool:
    """Whether a dimension has padding."""
    return any(map(is_padded, atoms))


def plain(shape: Iterable[Size]) -> Dims:
    """Dimensions of one atom each, like those of an input."""
    return tuple(_atom(size) for size in shape)


def _atom(size: Size) -> Atoms:
    if is_padded(size):
        return (size,)
    number = int(expression(size))
    return () if number == 1 else (number,)


def product(atoms: Atoms) -> Size:
    """Padded size of a dimension."""
    return math.prod(atoms)


def is_prefix(atoms: Atoms) -> bool:
    """Whether the true elements come first: only the outermost atom has a tail."""
    return not has_tail(atoms[1:])


def same(left: Atoms, right: Atoms) -> bool:
    """Whether two dimensions of equal size have their true elements at the same positions."""
    if is_prefix(left) and is_prefix(right):
        return equal_sizes(product(left), product(right))
    return _signature(left) == _signature(right)


def _signature(atoms: Atoms) -> list[str]:
    """Atoms with adjacent static ones merged, as text."""
    merged: list[sympy.Expr] = []
    for atom in map(expression, atoms):
        if merged and not merged[-1].free_symbols and not atom.free_symbols:
            merged[-1] *= atom
        else:
            merged.append(atom)
    return [str(sympy.expand(m)) for m in merged]


def equal_sizes(left: Any, right: Any) -> bool:
    """Whether two sizes are the same expression."""
    return bool(sympy.expand(expression(left) - expression(right)) == 0)


def broadcast(many: Sequence[Dims]) -> Dims:
    """Dimensions of the result of an elementwise operator: per dimension, the operand with the most atoms."""
    rank = max((len(dims) for dims in many), default=0)
    return tuple(max((dims[i - rank] for dims in many if i - rank >= -len(dims)), key=len) for i in range(rank))


def text(atoms: Atoms) -> str:
    """For messages: `4*s77`."""
    return "*".join(str(expression(a)) for a in atoms) or "1"


def regrouped(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """The atoms of `dims`, regrouped for a view of `shape`; None if that would split a padded atom."""
    left = [atom for atoms in dims for atom in atoms]
    out: list[Atoms] = []
    for size in shape:
        taken = _take(left, expression(size))
        if taken is None:
            return None
        out.append(taken)
    return None if left else tuple(out)


def _take(left: list[Size], wanted: sympy.Expr) -> Atoms | None:
    """Take atoms from the front of `left` whose product is `wanted`; a static atom may be split."""
    taken: list[Size] = []
    missing = sympy.sympify(wanted)
    while sympy.expand(missing - 1) != 0:
        if not left:
            return None
        atom = left.pop(0)
        rest = sympy.cancel(missing / expression(atom))
        if sympy.fraction(sympy.together(rest))[1] == 1:
            taken.append(atom)
            missing = rest
        elif isinstance(atom, int) and missing.is_Integer and atom % int(missing) == 0:
            taken.append(int(missing))
            left.insert(0, atom // int(missing))
            missing = sympy.Integer(1)
        else:
            return None
    return tuple(taken)
