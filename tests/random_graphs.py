"""Random small graphs of torch operators: pointwise, views, reductions, products, writes into inputs.

A graph is drawn operator by operator on values it has already, and run eagerly as it grows, so that each
operator fits its operands. Floating-point operators are continuous and bounded: where a rounding could turn
a comparison round or overflow, no error bound holds, so comparisons take integers, and exp a bounded argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

_DTYPES = (torch.float32, torch.float32, torch.int64, torch.bool)
# Mostly one size, so that operands fit each other.
_SIZES = (3, 3, 3, 3, 1, 2, 0)
_LAYOUTS = ("contiguous", "transposed", "strided")
MIN_STEPS, MAX_STEPS = 4, 10

Value = torch.Tensor
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class RandomGraph:
    """A graph and a recipe for its inputs.

    Attributes:
        gm: Takes the inputs; returns a tuple of tensors, perhaps inputs or views of them.
        inputs: (shape, dtype, layout) of each.
        seed: Of the inputs' values.
    """

    gm: fx.GraphModule
    inputs: tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
    seed: int

    def make_inputs(self) -> list[Value]:
        """Equal inputs in fresh memory at each call."""
        return [_input(self.seed + i, *spec) for i, spec in enumerate(self.inputs)]

    def __repr__(self) -> str:
        return f"inputs={self.inputs}, seed={self.seed}\n{self.gm.code}"


def _input(seed: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Value:
    generator = torch.Generator().manual_seed(seed)
    whole = [*shape[:-1], 2 * shape[-1]] if layout == "strided" and shape else list(shape)
    if layout == "transposed":
        whole.reverse()
    values = torch.randint(-16, 17, whole, generator=generator)
    # Quarters: exact in bfloat16 too.
    values = values / 4 if dtype.is_floating_point else values > 0 if dtype is torch.bool else values
    if layout == "transposed":
        return values.permute(tuple(reversed(range(values.dim()))))
    return values[..., ::2] if layout == "strided" and shape else values


class _Growing:
    """A graph under construction, with the eager value of each node."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.graph = draw, fx.Graph()
        self.values: dict[fx.Node, Value] = {}

    def pick(self, wanted: Callable[[Value], bool]) -> fx.Node | None:
        fitting = [n for n, v in self.values.items() if wanted(v)]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def add(self, target: Callable[..., Any], *args: Any) -> None:
        """Append `target(*args)`, if there are such operands and eager accepts them."""
        if any(a is None for a in torch.utils._pytree.tree_leaves(args)):
            return
        real = fx.node.map_arg(args, lambda n: self.values[n])
        try:
            value = target(*real)
        except (RuntimeError, IndexError, TypeError):  # these operands do not fit; another operator will
            return
        if value.numel() <= 512:
            self.values[self.graph.call_function(target, args)] = value


def _is_float(v: Value) -> bool:
    return v.is_floating_point()


def _is_whole(v: Value) -> bool:
    return not v.is_floating_point()


def _any(v: Value) -> bool:
    return True


def _exp(x: Value) -> Value:
    return torch.tanh(x).exp()


def _gelu(x: Value) -> Value:
    return torch.nn.functional.gelu(x)


_UNARY = (
    torch.neg, torch.abs, torch.relu, torch.tanh, torch.sigmoid, torch.sin, _exp, _gelu, torch.nn.functional.silu,
    torch.clone,
)  # fmt: skip
_BINARY = (torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum)
_COMPARE = (torch.gt, torch.eq, torch.le)
_REDUCE = (torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp)
_ALONG = (torch.cumsum, torch.softmax)


def _unary(g: _Growing) -> None:
    g.add(g.draw(st.sampled_from(_UNARY)), g.pick(_is_float))


def _binary(g: _Growing) -> None:
    first = g.pick(_any)
    other = g.pick(_any) if g.draw(st.booleans()) else g.draw(st.sampled_from((2, -3, 0.5, 1.25)))
    g.add(g.draw(st.sampled_from(_BINARY)), first, other)


def _compare(g: _Growing) -> None:
    g.add(g.draw(st.sampled_from(_COMPARE)), g.pick(_is_whole), g.pick(_is_whole))


def _where(g: _Growing) -> None:
    g.add(torch.where, g.pick(lambda v: v.dtype is torch.bool), g.pick(_is_float), g.pick(_is_float))


def _reduce(g: _Growing) -> None:
    g.add(g.draw(st.sampled_from(_REDUCE)), g.pick(_any), g.draw(st.integers(-2, 1)), g.draw(st.booleans()))


def _along(g: _Growing) -> None:
    g.add(g.draw(st.sampled_from(_ALONG)), g.pick(_is_float), g.draw(st.integers(-2, 1)))


def _product(g: _Growing) -> None:
    first = g.pick(lambda v: _is_float(v) and v.dim() > 0)
    if first is not None:
        inner = g.values[first].shape[-1]
        g.add(torch.matmul, first, g.pick(lambda v: _is_float(v) and v.dim() == 2 and v.shape[0] == inner))


def _linear(g: _Growing) -> None:
    first = g.pick(lambda v: _is_float(v) and v.dim() > 0)
    if first is not None:
        inner = g.values[first].shape[-1]
        g.add(
            torch.nn.functional.linear, first, g.pick(lambda v: _is_float(v) and v.dim() == 2 and v.shape[1] == inner)
        )


def _join(g: _Growing) -> None:
    g.add(torch.cat, [g.pick(_any), g.pick(_any)], g.draw(st.integers(-1, 1)))


def _pick_rows(g: _Growing) -> None:
    rows = g.pick(lambda v: v.dim() == 2 and v.shape[0] > 0)
    index = g.pick(lambda v: v.dtype is torch.int64 and v.dim() == 1)
    if rows is not None and index is not None:
        before = set(g.values)
        g.add(torch.remainder, index, g.values[rows].shape[0])
        for bounded in set(g.values) - before:
            g.add(torch.index_select, rows, 0, bounded)


def _view(g: _Growing) -> None:
    dim = g.draw(st.integers(-2, 1))
    target, *rest = g.draw(
        st.sampled_from(
            [
                (torch.flatten,),
                (torch.unsqueeze, dim),
                (torch.squeeze,),
                (torch.transpose, 0, -1),
                (torch.select, dim, 0),
                (torch.narrow, dim, 0, 1),
                (torch.flip, [dim]),
                (torch.Tensor.expand, 2, 3),
                (torch.Tensor.reshape, -1, 1),
                (torch.Tensor.diagonal,),
                (torch.Tensor.t,),
            ]
        )
    )
    g.add(target, g.pick(_any), *rest)


def _convert(g: _Growing) -> None:
    """Whole numbers to the default floating-point dtype, which is what the float64 oracle changes."""
    g.add(torch.true_divide, g.pick(_is_whole), 2)


def _write(g: _Growing) -> None:
    """Overwrite an input, a view of one or an intermediate value."""
    target = g.draw(st.sampled_from((torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.copy_)))
    written = g.pick(_any)
    other = g.pick(lambda v: v.dtype is g.values[written].dtype)
    g.add(target, written, other)


_STEPS = (
    _unary, _binary, _compare, _where, _reduce, _along, _product, _linear, _join, _pick_rows, _view, _view,
    _convert, _write,
)  # fmt: skip


@st.composite
def random_graphs(draw: Draw) -> RandomGraph:
    """Graphs of at most `MAX_STEPS` steps on two to four inputs."""
    shapes = st.one_of(st.just((3, 3)), st.lists(st.sampled_from(_SIZES), max_size=3).map(tuple))
    spec = st.tuples(shapes, st.sampled_from(_DTYPES), st.sampled_from(_LAYOUTS))
    inputs = tuple(draw(st.lists(spec, min_size=2, max_size=4)))
    seed = draw(st.integers(0, 1000))
    growing = _Growing(draw)
    for i, value in enumerate(RandomGraph(fx.GraphModule({}, fx.Graph()), inputs, seed).make_inputs()):
        growing.values[growing.graph.placeholder(f"x{i}")] = value
    for step in draw(st.lists(st.sampled_from(_STEPS), min_size=MIN_STEPS, max_size=MAX_STEPS)):
        step(growing)
    nodes = list(growing.values)
    results = draw(st.lists(st.sampled_from(nodes[-4:]), min_size=1, max_size=3))
    growing.graph.output(tuple(results))
    return RandomGraph(fx.GraphModule({}, growing.graph), inputs, seed)
