"""Random small graphs through every level: results, and inputs written to, against eager.

Tolerance. Rounding moves each node's value by a share u of itself at most, once as an operand and once as a
result. To first order the error of the whole is at most the sum over the nodes of what such a move of one
node does to the outputs. Each of these is measured in float64: the largest effect of a few random moves
within [-u, u] and of one that is +u everywhere. `_SAFETY` covers the two roundings of a node and the worst
case that the draws miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from tests.random_graphs import RandomGraph, random_graphs

_SAFETY = 6.0
_DRAWS = 4
_FLOAT32, _BFLOAT16 = 2.0**-24, 2.0**-9

_SETTINGS: list[tuple[dict[str, str], float]] = [
    ({"precision": "float32"}, _FLOAT32),
    ({"level": "conservative"}, _BFLOAT16),
    ({"level": "balanced"}, _BFLOAT16),
    ({"level": "aggressive"}, _BFLOAT16),
]

Run = Callable[..., Any]


@dataclass(frozen=True)
class _Move:
    """One node's value, times 1 + share; shares are drawn from a generator, or are one number."""

    node: fx.Node
    unit: float
    generator: torch.Generator | None

    def share(self, like: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            return torch.full_like(like, self.unit)
        return self.unit * (2 * torch.rand(like.shape, dtype=like.dtype, generator=self.generator) - 1)


class _Moved(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, move: _Move) -> None:
        super().__init__(gm)
        self._move = move

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node is not self._move.node or not value.is_floating_point():
            return value
        moved = value * (1 + self._move.share(value))
        # An input moves in place, so that the caller sees it too; a view with repeated memory cannot be written.
        return value.copy_(moved) if node.op == "placeholder" else moved


def _run(graph: RandomGraph, run: Run, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Results, then the inputs as the run left them."""
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in graph.make_inputs()]
    with torch.no_grad(), _default_dtype(dtype):
        return [*run(*inputs), *inputs]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _allowed(graph: RandomGraph, exact: list[torch.Tensor], unit: float) -> list[float]:
    """For each result, how far rounding may move it, as a norm."""
    allowed = [0.0] * len(exact)
    for node in graph.gm.graph.nodes:
        if node.op == "output":
            continue
        generator = torch.Generator().manual_seed(0)
        moves = [_Move(node, unit, None)] + [_Move(node, unit, generator)] * _DRAWS
        effects = [_distances(_run(graph, _Moved(graph.gm, m).run, torch.float64), exact) for m in moves]
        allowed = [a + _SAFETY * max(e) for a, e in zip(allowed, zip(*effects, strict=True), strict=True)]
    return allowed


def _distances(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [_distance(g, w) for g, w in zip(got, wanted, strict=True)]


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference where the reference is finite; elsewhere the values have to be the same."""
    got, wanted = got.double(), wanted.double()
    finite = wanted.isfinite()
    torch.testing.assert_close(got[~finite], wanted[~finite], equal_nan=True)
    return float((got[finite] - wanted[finite]).norm())


def _check(graph: RandomGraph) -> None:
    eager = _run(graph, graph.gm)
    exact = _run(graph, graph.gm, torch.float64)
    allowed = {unit: _allowed(graph, exact, unit) for unit in (_FLOAT32, _BFLOAT16)}
    for options, unit in _SETTINGS:
        torch._dynamo.reset()
        got = _run(graph, torch.compile(graph.gm, backend="kp_tpu", options=options, dynamic=False))
        assert [(g.dtype, g.shape) for g in got] == [(e.dtype, e.shape) for e in eager], (options, graph.gm.code)
        distances = _distances(got, exact)
        assert all(d <= a for d, a in zip(distances, allowed[unit], strict=True)), (options, distances, allowed[unit])


@pytest.mark.slow  # `tests/hunt` has 150 programs of more kinds
@settings(max_examples=15)
@given(random_graphs())
def test_random_graphs_match_eager(graph: RandomGraph) -> None:
    _check(graph)


@pytest.mark.slow
@settings(max_examples=300)
@given(random_graphs())
def test_many_random_graphs_match_eager(graph: RandomGraph) -> None:
    _check(graph)
