"""Under SPMD: how the results of a graph are divided over the devices, chosen from how its arguments are.

A gradient lies as what it is the gradient of, and a new value of an argument as the argument. Other results lie as
`graph/placements.py` says, which `aot` asks too. What that leaves whole, XLA decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.placements import result_placements
from kp_dynamo.lowering import LoweringSpec, named_meshes
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import Placement, hlo_sharding, is_whole, placement_of

Texts = tuple[str, ...]
"""The sharding of each argument or result, in XLA's notation; "" for what is no tensor, or is left to XLA."""

_MOST_FORWARDS = 64  # of dynamic sizes there may be one a call; a backward is seldom that far behind


@dataclass(frozen=True)
class _Forward:
    """The arguments of a forward that has run: their shardings and sizes."""

    texts: Texts
    shapes: tuple[tuple[int, ...] | None, ...]


class ResultShardings:
    """Chooses the shardings of the results of one capture's graphs.

    A backward does not read all parameters, such as an embedding, so the forward notes how they lie.
    """

    def __init__(self) -> None:
        # The last one is the last that ran. Equal pieces of a divided graph share this capture, so all forwards may run
        # before the first backward.
        self._forwards: dict[_Forward, None] = {}
        self._activations: dict[tuple[fx.GraphModule, Texts, tuple[NamedMesh, ...]], Texts] = {}

    def choose(self, gm: fx.GraphModule, spec: LoweringSpec, args: Sequence[Any], texts: Sequence[str]) -> Texts:
        """The shardings of the results for arguments with these shardings, one text a tensor."""
        left = iter(texts)
        given = tuple(next(left) if isinstance(a, torch.Tensor) else "" for a in args)
        found = self._of_gradients(gm.graph, given) if spec.name == "backward" else self._of_activations(gm, given)
        if spec.name == "forward":
            forward = _Forward(given, tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else None for a in args))
            self._forwards.pop(forward, None)
            self._forwards[forward] = None
            for old in list(self._forwards)[:-_MOST_FORWARDS]:
                self._forwards.pop(old, None)
        written = [given[i] if i is not None else "" for i in spec.overwritten]
        merged = [new or old for new, old in zip(written, found, strict=False)]
        return (*merged, *found[len(merged) :])

    def _of_activations(self, gm: fx.GraphModule, given: Texts) -> Texts:
        meshes = named_meshes()
        key = (gm, given, tuple(meshes))
        if key not in self._activations:
            self._activations[key] = _of_activations(gm.graph, given, meshes)
        return self._activations[key]

    def _of_gradients(self, graph: fx.Graph, given: Texts) -> Texts:
        """The shardings of the forward's arguments; "" where a gradient has other sizes or would lie unevenly."""
        shapes = [_sizes(result) for result in _results(graph)]
        names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        read = dict(zip(names, given, strict=True))
        forward = next((f for f in reversed(list(self._forwards)) if _belongs(f, read)), None)
        if forward is None or len(forward.texts) != len(shapes):
            return ("",) * len(shapes)
        pairs = zip(shapes, forward.shapes, forward.texts, strict=True)
        return tuple(text if _fits(shape, of, text) else "" for shape, of, text in pairs)


def _belongs(forward: _Forward, read: dict[str, str]) -> bool:
    """Whether what a backward reads of a forward's arguments, which are called primals_1 and so on, lies as there."""
    names = [f"primals_{i + 1}" for i in range(len(forward.texts))]
    return all(read.get(name, text) == text for name, text in zip(names, forward.texts, strict=True))


def _fits(gradient: tuple[Any, ...] | None, argument: tuple[int, ...] | None, text: str) -> bool:
    """Whether a gradient may lie as its argument: of equal sizes, as far as they are known, and in equal parts."""
    if not gradient or not argument or len(gradient) != len(argument):
        return False
    if any(isinstance(a, int) and a != b for a, b in zip(gradient, argument, strict=True)):
        return False
    found = re.match(r"\{devices=\[([\d,]+)\]", text)
    parts = map(int, found[1].split(",")) if found else ()
    return not any(size % count for size, count in zip(argument, parts, strict=False))


def _of_activations(graph: fx.Graph, given: Texts, meshes: Sequence[NamedMesh]) -> Texts:
    """What `result_placements` divides, on the first mesh on which all arguments lie."""
    results = _results(graph)
    ranks = [len(_sizes(node) or ()) for node in graph.find_nodes(op="placeholder")]
    for mesh in meshes:
        placements = [_placement(text, mesh, rank) for text, rank in zip(given, ranks, strict=True)]
        known = [p for p in placements if p is not None]
        if len(known) < len(placements) or all(is_whole(p, mesh) for p in known):
            continue
        found = zip(result_placements(graph, known, mesh), results, strict=True)
        return tuple("" if is_whole(p, mesh) else hlo_sharding(p, mesh, len(_sizes(r) or ())) for p, r in found)
    return ("",) * len(results)


def _placement(text: str, mesh: NamedMesh, rank: int) -> Placement | None:
    return placement_of(text, mesh, rank) if text else ()


def _results(graph: fx.Graph) -> list[Any]:
    results: Any = graph.output_node().args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _sizes(node: Any) -> tuple[Any, ...] | None:
    value = tensor_of(node)
    return None if value is None else tuple(value.shape)
