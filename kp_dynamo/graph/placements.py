"""How the values of a graph lie on a mesh, if its inputs lie as given.

The result of a matmul lies along the rows of its first operand and the columns of its second; what it sums over is
whole in the result. Elementwise operators, and all without a rule here, keep each dimension that an operand of the same
size has. An axis divides one dimension of a tensor at most: the first operand decides, and the largest is the first.

XLA finds the same or better placements for what is inside a program. These are for the results of a program, which XLA
would otherwise replicate: activations that are saved for the backward, and values that pass between programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

import kp_dynamo.ops.contract
import kp_dynamo.ops.flash_attention
import kp_dynamo.ops.linear_act
import kp_dynamo.ops.linear_cross_entropy  # noqa: F401  # they define the operators in the tables below
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.reshapes import groups_of_dims, transposed_order
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import Placement, axes_of

aten = torch.ops.aten
_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.clone, aten.alias)
_REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.argmax, aten.var, aten.logsumexp)
_MATMULS = {
    aten.mm: "mk,kn->mn",
    aten.bmm: "bmk,bkn->bmn",
    aten.linear: "...k,nk->...n",
    torch.ops.kp.linear_act: "mk,kn->mn",
    torch.ops.kp.linear_act_train: "mk,kn->mn",
}

_WITH_STATISTICS = (torch.ops.kp.attention_train, torch.ops.kp.flash_attention_train)


def result_placements(graph: fx.Graph, given: Sequence[Placement], mesh: NamedMesh) -> list[Placement]:
    """The placement of each result of a graph; () for a result that is no tensor.

    Args:
        graph: An ATen graph.
        given: The placement of each placeholder; () for what is no tensor.
        mesh: The mesh.
    """
    found = _Placements(mesh)
    found.add_inputs(graph.find_nodes(op="placeholder"), given)
    for node in graph.nodes:
        if node.op == "call_function":
            found.add(node)
    results = graph.output_node().args[0]
    return [found.of(result) for result in (results if isinstance(results, (list, tuple)) else [results])]


class _Placements:
    """The placements of the nodes so far; of a node with several results, that of each."""

    def __init__(self, mesh: NamedMesh) -> None:
        self._mesh = mesh
        self._found: dict[fx.Node, Any] = {}

    def add_inputs(self, nodes: Iterable[fx.Node], given: Sequence[Placement]) -> None:
        for node, placement in zip(nodes, given, strict=True):
            shape = _shape(node)
            self._found[node] = None if shape is None else self._fitting(shape, _padded(placement, len(shape)))

    def of(self, node: Any) -> Placement:
        found = self._found.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, tuple) else ()

    def add(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            self._found[node] = [self._placement(node, v) for v in value]
        else:
            self._found[node] = self._placement(node, value)

    def _placement(self, node: fx.Node, value: Any) -> Placement:
        shape = tuple(value.shape) if _is_static(value) else None
        return () if shape is None else self._fitting(shape, self._rule(node, shape))

    def _rule(self, node: fx.Node, shape: tuple[int, ...]) -> Placement:
        packet = getattr(node.target, "overloadpacket", node.target)
        first = self.of(node.args[0]) if node.args else ()
        if getattr(node.target, "__name__", "") == "getitem":
            found = self._found.get(node.args[0])  # type: ignore[arg-type]  # a node
            return found[node.args[1]] if isinstance(found, list) else ()  # type: ignore[index]
        if packet in _RESHAPES and first and (source := _shape(node.args[0])) is not None:
            return _reshaped(source, first, shape, self._count)
        if packet in (aten.t, aten.transpose, aten.permute) and first:
            return tuple(first[i] for i in transposed_order(node))
        if packet in _REDUCTIONS and first and len(first) > len(shape):
            return _without(first, node.args[1] if len(node.args) > 1 else None)
        if packet is aten.embedding:
            return (*self.of(node.args[1]), *self.of(node.args[0])[1:])
        if packet in _MATMULS:
            return self._contraction(node.args[:2], _MATMULS[packet])
        if packet in (aten.addmm, aten.baddbmm):
            return self._contraction(node.args[1:3], "mk,kn->mn" if packet is aten.addmm else "bmk,bkn->bmn")
        if packet is aten.convolution:
            return (*first[:1], *self.of(node.args[1])[:1])
        if packet in _WITH_STATISTICS and first and shape == (2, *(_shape(node.args[0]) or ())[:2]):
            return (None, *first[:2])  # two numbers for each query of each head
        if packet is torch.ops.kp.linear_cross_entropy and self._is_of_logits(node, shape):
            return self._of_logits(node)
        if packet is torch.ops.kp.contract:
            return self._contraction(node.args[:2], str(node.args[3]))
        return self._kept(node, shape)

    def _is_of_logits(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        """Whether a result of a fused loss has one element for each logit: the exponentials that it keeps."""
        x, weight = (_shape(operand) for operand in node.args[:2])
        return x is not None and weight is not None and shape == (x[0], weight[0])

    def _of_logits(self, node: fx.Node) -> Placement:
        """Rows lie as those of the operand, classes as those of the weight along other axes: it is gathered."""
        rows, classes = self.of(node.args[0])[0], axes_of(self.of(node.args[1])[0])
        kept = tuple(axis for axis in classes if axis not in axes_of(rows))
        return rows, kept or None

    def _contraction(self, operands: Sequence[Any], equation: str) -> Placement:
        """The placement of an einsum's result."""
        terms, result = equation.replace(" ", "").split("->")
        axes: dict[str, Any] = {}
        for operand, term in zip(operands, terms.split(","), strict=False):
            placement = self.of(operand)
            letters = term.replace("...", "".join(chr(ord("A") + i) for i in range(len(placement) - len(term) + 3)))
            for letter, along in zip(letters, placement, strict=False):
                axes.setdefault(letter, None)
                axes[letter] = axes[letter] or along
        dots = "".join(sorted(letter for letter in axes if letter.isupper()))
        return tuple(axes.get(letter) for letter in result.replace("...", dots))

    def _kept(self, node: fx.Node, shape: tuple[int, ...]) -> Placement:
        """For each dimension, the axes of the first operand with a dimension of the same size there, from the right."""
        kept: list[Any] = [None] * len(shape)
        operands = [(s, self.of(n)) for n in node.all_input_nodes if (s := _shape(n)) is not None]
        for size, placement in sorted(operands, key=lambda pair: -prod(pair[0])):
            for i in range(1, min(len(size), len(shape), len(placement)) + 1):
                if size[-i] == shape[-i]:
                    kept[-i] = kept[-i] or placement[-i]
        return tuple(kept)

    def _fitting(self, shape: tuple[int, ...], placement: Placement) -> Placement:
        """The placement, in which each axis occurs once and each dimension divides evenly."""
        used: set[str] = set()
        kept: list[Any] = []
        for size, along in zip(shape, _padded(placement, len(shape)), strict=True):
            axes = tuple(axis for axis in axes_of(along) if axis not in used)
            fits = axes == axes_of(along) and size % self._count(along) == 0
            kept.append(along if fits else None)
            used.update(axes if fits else ())
        return tuple(kept)

    def _count(self, along: Any) -> int:
        return prod(self._mesh.size(axis) for axis in axes_of(along))


def _shape(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor with static sizes. Anything else is not divided and gives None."""
    value = tensor_of(node)
    return tuple(value.shape) if value is not None and _is_static(value) else None


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _padded(placement: Placement, rank: int) -> Placement:
    return (*placement, *[None] * (rank - len(placement)))[:rank]


def _without(placement: Placement, dims: Any) -> Placement:
    """A placement without the reduced dimensions."""
    given = range(len(placement)) if dims is None else [dims] if isinstance(dims, int) else dims
    reduced = {dim % len(placement) for dim in given}
    return tuple(along for i, along in enumerate(placement) if i not in reduced)


def _reshaped(
    source: tuple[int, ...], placement: Placement, shape: tuple[int, ...], count: Callable[[Any], int]
) -> Placement:
    """The placement of a tensor after a reshape: what divides a group of dimensions divides its outermost ones.

    The next dimension counts only if each chip has one element of those before it.
    """
    found: list[Any] = [None] * len(shape)
    for old, new in groups_of_dims(source, shape):
        axes = _outermost(source, old, placement, count)
        for dim in new:
            taken: list[str] = []
            while axes and shape[dim] % count((*taken, axes[0])) == 0:
                taken.append(axes.pop(0))
            found[dim] = taken[0] if len(taken) == 1 else tuple(taken) or None
            if shape[dim] != count(tuple(taken)):
                break
    return tuple(found)


def _outermost(
    source: tuple[int, ...], dims: Sequence[int], placement: Placement, count: Callable[[Any], int]
) -> list[str]:
    """The axes that divide the outermost of these dimensions, from the outside."""
    found: list[str] = []
    for dim in dims:
        found.extend(axes_of(placement[dim]))
        if source[dim] != count(placement[dim]):
            break
    return found
