"""What makes layers of a graph different, for the user of a model whose graph stays whole."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from kp_dynamo.blocks.boundaries import Boundaries
from kp_dynamo.blocks.node_effects import operands_of
from kp_dynamo.blocks.repeats import runs
from kp_dynamo.graph.module_paths import layer_of, module_of

_LEAST_OPERATORS = 4


class _Layer(NamedTuple):
    name: str
    start: int


def nearest_difference(nodes: Sequence[fx.Node], ids: Sequence[int], boundaries: Boundaries) -> str:
    """The first difference between two neighboring layers, as the end of a sentence; "" if there are no such layers.

    Layers are the modules of one class in a list, or else stretches with the same sequence of operators.

    Args:
        nodes: The calls of the graph.
        ids: Their numbers, see `node_ids`.
        boundaries: Where it may be divided.
    """
    layers = _modules(nodes) or _stretches(nodes)
    position = {node: i for i, node in enumerate(nodes)}
    differences = {pair: _first_difference(pair, nodes, ids, position) for pair in itertools.pairwise(layers)}
    for (one, other), found in differences.items():
        if not found and not boundaries.is_open(other.start):
            return f"; {other.name} repeats {one.name}, but between them {boundaries.reason(other.start)}"
    return next(
        (f"; {other.name} differs from {one.name}: {found}" for (one, other), found in differences.items() if found), ""
    )


def _first_difference(
    pair: tuple[_Layer, _Layer], nodes: Sequence[fx.Node], ids: Sequence[int], position: dict[fx.Node, int]
) -> str:
    one, other = pair
    for offset in range(min(other.start - one.start, len(nodes) - other.start)):
        calls = one.start + offset, other.start + offset
        found = _difference(calls, nodes, ids) or _difference_of_operands(calls, pair, nodes, position)
        if found:
            return found
    return ""


def _modules(nodes: Sequence[fx.Node]) -> list[_Layer]:
    """The most numerous modules of one class in one list."""
    found: dict[object, dict[str, int]] = defaultdict(dict)
    for position, node in enumerate(nodes):
        path, kind = layer_of(node)
        if path:
            found[path.rpartition(".")[0], kind].setdefault(path, position)
    most = max(found.values(), key=len, default={})
    named = [_Layer(path if "." in path else f"module {path}", start) for path, start in most.items()]
    return named if len(named) > 1 else []


def _stretches(nodes: Sequence[fx.Node]) -> list[_Layer]:
    numbers: dict[object, int] = {}
    run = next(
        (
            r
            for r in runs([numbers.setdefault(n.target, len(numbers)) for n in nodes], 2)
            if r.period >= _LEAST_OPERATORS
        ),
        None,
    )
    if run is None:
        return []
    starts = range(run.start, run.stop - run.period + 1, run.period)
    return [_Layer(f"the stretch of operators {start} to {start + run.period - 1}", start) for start in starts]


def _difference(pair: tuple[int, int], nodes: Sequence[fx.Node], ids: Sequence[int]) -> str:
    """The difference between two operators themselves: operator, constant, or result."""
    if ids[pair[0]] == ids[pair[1]]:
        return ""
    one, other = (nodes[position] for position in pair)
    if one.target != other.target:
        return f"operator {_name(other)} instead of {_name(one)}{_place(other)}"
    for a, b in zip(_constants(one), _constants(other), strict=False):
        if repr(a) != repr(b):
            return f"{_name(other)}{_place(other)} has the constant {b!r} instead of {a!r}"
    kinds = _kinds(one, other)
    if kinds:
        return f"{_name(other)}{_place(other)} returns {kinds}"
    return f"{_name(other)}{_place(other)} has an argument without a text, or a pass reads the module path"


def _difference_of_operands(
    pair: tuple[int, int], layers: tuple[_Layer, _Layer], nodes: Sequence[fx.Node], position: dict[fx.Node, int]
) -> str:
    """The difference between what two equal operators read."""
    node = nodes[pair[1]]
    for operands in zip(*(operands_of(nodes[p]) for p in pair), strict=False):
        inside = [position.get(o, -1) - layer.start for o, layer in zip(operands, layers, strict=True)]
        if max(inside) >= 0 and inside[0] != inside[1]:
            return f"{_name(node)}{_place(node)} reads another value"
        kinds = _kinds(*operands)
        if kinds:
            return f"{_name(node)}{_place(node)} reads {kinds}"
    return ""


def _constants(node: fx.Node) -> list[Any]:
    return [leaf for leaf in tree_leaves((node.args, dict(node.kwargs))) if not isinstance(leaf, fx.Node)]


def _kinds(one: fx.Node, other: fx.Node) -> str:
    """What `other` is, and `one` instead, with the first property that differs; "" if none does."""
    values: list[Any] = [node.meta.get("example_value") for node in (one, other)]
    if not all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values):
        return ""
    first, second = (f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in values)
    if first != second:
        return f"{second} instead of {first}"
    for name in ("requires_grad", "stride"):
        a, b = (value.stride() if name == "stride" else value.requires_grad for value in values)
        if a != b:
            return f"{second} with {name}={b} instead of {a}"
    return ""


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _place(node: fx.Node) -> str:
    module = module_of(node)
    return f" in {module}" if module else ""
