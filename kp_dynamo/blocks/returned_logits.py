"""Takes the gradient of returned logits out of a graph that also returns their loss.

A model of transformers returns its loss and its logits, and the logits seldom have a gradient. AOTAutograd then passes
zeros of their size to the backward, which adds them to the gradient that the loss gives the logits: neither can be
left out of a compiled program. So the graph returns the logits without a gradient, and what they are computed from;
`autograd.replayed_gradient` computes the gradients of these if the logits have one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.blocks.head_chain import HeadChain, head_chain
from kp_dynamo.blocks.node_effects import effects_of
from kp_dynamo.blocks.regions import Region, name_of, regions

_LOSSES = ("cross_entropy", "nll_loss", "gather", "logsumexp")


@dataclass(frozen=True)
class ReturnedLogits:
    """Logits that a graph returns without their gradient.

    Attributes:
        position: The result that they are.
        sources: What they are computed from: n for input n, None for the last result, which the graph has in addition.
        is_read: Of each source, whether a gradient of the logits depends on its values.
        piece: Computes the logits from the sources.
        autocasts: The arguments of the autocast regions in which it runs, outermost first.
    """

    position: int
    sources: tuple[int | None, ...]
    is_read: tuple[bool, ...]
    piece: fx.GraphModule
    autocasts: tuple[tuple[Any, ...], ...]


def separate_logits(gm: fx.GraphModule, least_bytes: int) -> ReturnedLogits | None:
    """Make Dynamo's graph return logits of at least `least_bytes` without a gradient; None if it returns none.

    The graph then has one result more, unless the logits are computed from its inputs alone.
    """
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    losses = [node for node in gm.graph.nodes if name_of(node) in _LOSSES]
    for position, result in enumerate(results if losses else ()):
        chain = head_chain(result) if _is_large(result, least_bytes) else None
        if chain is not None and _reach(chain.nodes, losses):
            states = dict(zip(gm.graph.nodes, regions(list(gm.graph.nodes)), strict=False))
            if _is_right(gm, chain, results, states):
                return _separate(gm, results, position, chain, states[chain.linear].autocasts)
    return None


def _is_large(result: object, least_bytes: int) -> bool:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    return 4 * math.prod(hint_int(size, fallback=1) for size in value.shape) >= least_bytes


def _reach(chain: Sequence[fx.Node], losses: Sequence[fx.Node]) -> bool:
    """Whether a loss is computed from a node of the chain."""
    found, stack = set(chain), list(chain)
    while stack:
        new = set(stack.pop().users) - found
        found |= new
        stack += new
    return any(loss in found for loss in losses)


def _is_right(gm: fx.GraphModule, chain: HeadChain, results: Sequence[Any], states: Mapping[fx.Node, Region]) -> bool:
    """Whether a chain gives the same values after the graph has run, and its gradient can be separated."""
    if any(states[node].level or not states[node].grad for node in chain.nodes):
        return False
    if [_storage(node) for node in results].count(_storage(chain.nodes[-1])) != 1:
        return False
    nodes = list(gm.graph.nodes)
    mode, later = FakeTensorMode(), nodes[nodes.index(chain.nodes[0]) :]
    return not any(effects_of(gm, node, mode).writes for node in later if node.op.startswith("call_"))


def _storage(node: object) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _separate(
    gm: fx.GraphModule, results: list[Any], position: int, chain: HeadChain, autocasts: Sequence[fx.Node]
) -> ReturnedLogits:
    graph, inputs, logits = gm.graph, gm.graph.find_nodes(op="placeholder"), chain.nodes[-1]
    piece = _piece(gm, chain)
    with graph.inserting_before(graph.output_node()):
        results[position] = _insert(graph, "detach", logits)
        if chain.x.op != "placeholder":
            # Not x itself if users get it or a view: what they do with its gradient is about their own result.
            shared = _storage(chain.x) in map(_storage, results)
            results.append(_insert(graph, "clone", chain.x) if shared else chain.x)
    graph.output_node().args = (tuple(results),)
    gm.recompile()
    places = tuple(inputs.index(node) if node.op == "placeholder" else None for node in chain.sources)
    return ReturnedLogits(position, places, chain.is_read, piece, tuple(node.args for node in autocasts))


def _insert(graph: fx.Graph, method: str, node: fx.Node) -> fx.Node:
    call = graph.call_method(method, (node,))
    call.meta["example_value"] = getattr(node.meta["example_value"], method)()
    return call


def _piece(gm: fx.GraphModule, chain: HeadChain) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in chain.sources}
    for node in chain.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[chain.nodes[-1]])
    return fx.GraphModule(gm, graph)
