"""Takes the gradient of returned logits out of a graph that also returns their loss.

A model of transformers returns its loss and its logits, and the logits seldom have a gradient. AOTAutograd then passes
zeros of their size to the backward, which adds them to the gradient that the loss gives the logits: neither can be
left out of a compiled program. So the graph returns the logits without a gradient, and what they are computed from;
`autograd.replayed_gradient` computes the gradients of these if the logits have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import hint_int
from torch.utils._pytree import tree_leaves

from kp_dynamo.blocks.node_effects import effects_of
from kp_dynamo.blocks.regions import name_of, regions

_LOSSES = ("cross_entropy", "nll_loss")
_LINEAR = "linear"
_VIEWS = ("getitem", "view", "reshape", "contiguous", "squeeze", "unsqueeze", "flatten")
_ELEMENTWISE = ("float", "to", "mul", "truediv", "div", "tanh")


@dataclass(frozen=True)
class ReturnedLogits:
    """Logits that a graph returns without their gradient.

    Attributes:
        position: The result that they are.
        sources: What they are computed from: n for input n, -1 - n for result n.
        num_results: The results of the graph before it had one more.
        piece: Computes the logits from the sources.
        autocasts: The arguments of the autocast regions in which it runs, outermost first.
    """

    position: int
    sources: tuple[int, ...]
    num_results: int
    piece: fx.GraphModule
    autocasts: tuple[tuple[Any, ...], ...]


def separate_logits(gm: fx.GraphModule, least_bytes: int) -> ReturnedLogits | None:
    """Make Dynamo's graph return logits of at least `least_bytes` without a gradient; None if it returns none.

    The graph then has one result more, unless the logits are computed from its inputs alone.
    """
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    losses = [node for node in gm.graph.nodes if name_of(node) in _LOSSES]
    for position, result in enumerate(results if losses else ()):
        chain = _chain(result) if _is_large(result, least_bytes) else ()
        if chain and _is_right(gm, chain, losses, results):
            return _separate(gm, results, position, chain)
    return None


def _is_large(result: object, least_bytes: int) -> bool:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    return 4 * math.prod(hint_int(size, fallback=1) for size in value.shape) >= least_bytes


def _chain(logits: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that compute logits: views of x, a linear layer whose weight is an input, and what follows it.

    Empty if the logits are computed in another way.
    """
    found = list(_before(logits, (*_VIEWS, *_ELEMENTWISE)))
    linear = found[-1].all_input_nodes[0] if found else logits
    if _name(linear) != _LINEAR or any(node.op != "placeholder" for node in linear.all_input_nodes[1:]):
        return ()
    before = list(_before(linear.all_input_nodes[0], _VIEWS))
    return tuple(reversed([*found, linear, *before]))


def _before(node: fx.Node, names: tuple[str, ...]) -> Iterator[fx.Node]:
    """A node and what it is computed from, as long as each has one of these names and reads one tensor."""
    while _name(node) in names and len(node.all_input_nodes) == 1 and _is_portable((node.args, node.kwargs)):
        yield node
        node = node.all_input_nodes[0]


def _name(node: fx.Node) -> str:
    return node.target if node.op == "call_method" else name_of(node)  # type: ignore[return-value]


def _is_portable(arguments: Any) -> bool:
    """Whether arguments name no device: in this graph every device is the CPU."""
    return not any(isinstance(leaf, (torch.device, str)) for leaf in tree_leaves(arguments))


def _is_right(gm: fx.GraphModule, chain: Sequence[fx.Node], losses: Sequence[fx.Node], results: Sequence[Any]) -> bool:
    """Whether a chain gives the same values after the graph has run, and its gradient can be separated."""
    x, nodes = chain[0].all_input_nodes[0], list(gm.graph.nodes)
    if x.op == "get_attr" or not isinstance(x.meta.get("example_value"), torch.Tensor) or not _reach(chain, losses):
        return False
    states = dict(zip(nodes, regions(nodes), strict=False))
    if any(states[node].level or not states[node].grad for node in chain):
        return False
    shared = [_storage(node) for node in results]
    if shared.count(_storage(chain[-1])) != 1:
        return False
    if x.op != "placeholder" and x not in results and _storage(x) in shared:
        return False
    mode, later = FakeTensorMode(), nodes[nodes.index(chain[0]) :]
    return not any(effects_of(gm, node, mode).writes for node in later if node.op.startswith("call_"))


def _reach(chain: Sequence[fx.Node], losses: Sequence[fx.Node]) -> bool:
    """Whether a loss is computed from a node of the chain."""
    found, stack = set(chain), list(chain)
    while stack:
        new = set(stack.pop().users) - found
        found |= new
        stack += new
    return any(loss in found for loss in losses)


def _storage(node: object) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _separate(gm: fx.GraphModule, results: list[Any], position: int, chain: Sequence[fx.Node]) -> ReturnedLogits:
    inputs = gm.graph.find_nodes(op="placeholder")
    sources = [node for node in dict.fromkeys(s for n in chain for s in n.all_input_nodes) if node not in chain]
    linear = next(node for node in chain if _name(node) == _LINEAR)  # what follows it is the same under autocast
    region = dict(zip(gm.graph.nodes, regions(list(gm.graph.nodes)), strict=False))[linear]
    piece = _piece(gm, sources, chain)
    output, logits = gm.graph.output_node(), chain[-1]
    with gm.graph.inserting_before(output):
        results[position] = gm.graph.call_method("detach", (logits,))
    results[position].meta["example_value"] = logits.meta["example_value"].detach()
    num_results = len(results)
    results += [node for node in sources if node.op != "placeholder" and node not in results]
    output.args = (tuple(results),)
    gm.recompile()
    places = tuple(inputs.index(node) if node.op == "placeholder" else -1 - results.index(node) for node in sources)
    autocasts = tuple(node.args for node in region.autocasts)
    return ReturnedLogits(position, places, num_results, piece, autocasts)


def _piece(gm: fx.GraphModule, sources: Sequence[fx.Node], chain: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in sources}
    for node in chain:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[chain[-1]])
    return fx.GraphModule(gm, graph)
