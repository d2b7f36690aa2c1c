"""Divides Dynamo's graph at the calls of repeated child modules (`block_calls`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.blocks.block_calls import call_block, choose, followed_key, group_of, learn
from kp_dynamo.blocks.boundaries import Boundaries
from kp_dynamo.blocks.divider import Divider
from kp_dynamo.blocks.division import Division, Undivided
from kp_dynamo.blocks.node_effects import Effects, EffectsOfNodes, effects_of, operands_of
from kp_dynamo.blocks.node_ids import node_ids
from kp_dynamo.blocks.regions import regions
from kp_dynamo.blocks.whole_graphs import CALLS, to_divide
from kp_dynamo.capture.capture import Capture


def block_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of child modules in Dynamo's graph."""
    return list(graph.find_nodes(op="call_function", target=call_block))


def drop_followed_calls(gm: fx.GraphModule) -> None:
    """Drop the nodes of the calls that Dynamo followed to learn what their results are like.

    What it followed for another reason remains, such as a call that changes Python objects, or one in the body of a
    higher-order operator.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for chosen in [node for graph in graphs for node in graph.find_nodes(op="call_function", target=choose)]:
        group_of(chosen).refusal = ""  # it was for this trace
        following = [chosen]
        while following[-1].op != "output" and following[-1].target is not learn:
            following.append(following[-1].next)
        last = following[-1]
        is_learned = last.target is learn and last.args[0] == chosen.args[0] and last.meta["example_value"][0]
        if is_learned and not group_of(chosen).is_asked_for:
            nodes = [node for node in following[1:-1] if node.op in CALLS]
            group_of(chosen).work[followed_key(chosen)] = [effects_of(gm, node, FakeTensorMode()) for node in nodes]
        _erase(following if is_learned else [chosen])
    for learned in [node for graph in graphs for node in graph.find_nodes(op="call_function", target=learn)]:
        _erase([learned])


def _erase(nodes: Sequence[fx.Node]) -> None:
    """Erase nodes, and what takes a constant out of the answers of `choose` and `learn`."""
    for node in reversed(nodes):
        for user in list(node.users):
            node.graph.erase_node(user)
        node.graph.erase_node(node)


def divide_at_calls(capture: Capture, *, with_modules: bool) -> Division | Undivided:
    """Divide a captured graph before and after each call of a child module."""
    prepared = to_divide(capture)
    if isinstance(prepared, str):
        return Undivided(prepared)
    capture = prepared
    calls = {call: _with_parts(call) for call in block_calls(capture.gm.graph)}
    nodes = [node for node in capture.gm.graph.nodes if node.op in CALLS]
    ids = node_ids(capture.gm, nodes, with_modules=with_modules)
    effects = EffectsOfNodes(capture.gm, dict(zip(nodes, ids, strict=True)))
    effects.update((node, Effects()) for parts in calls.values() for node in parts)
    boundaries = Boundaries(capture.gm.graph, nodes, effects, regions(nodes), capture.inputs)
    return CallDivider(capture, nodes, effects, boundaries, with_modules=with_modules).divided_at(calls)


def _with_parts(call: fx.Node) -> list[fx.Node]:
    """A call, and the nodes that take its results apart, moved to stand behind it."""
    parts = [call]
    for part in parts:
        for user in part.users:
            if user.target is operator.getitem and user not in parts:
                parts[-1].append(user)
                parts.append(user)
    return parts


class CallDivider(Divider):
    """A divider at calls; values between pieces have the device of the user's tensors, which the calls expect."""

    passes_on_device = False

    def divided_at(self, calls: dict[fx.Node, list[fx.Node]]) -> Division | Undivided:
        done = 0
        for call, parts in calls.items():
            start, stop = self._position[call], self._position[call] + len(parts)
            if not self._boundaries.is_open(start) or not self._boundaries.is_open(stop):
                return Undivided(f"{group_of(call).name} are called where the graph cannot be divided")
            self._add_rest(done, start)
            if not self._add_call(start, stop):
                return Undivided(f"{group_of(call).name} return values that are not tensors, and are read")
            done = stop
        return self._finished(done)

    def _add_call(self, start: int, stop: int) -> bool:
        nodes, outputs = self._nodes[start:stop], self._outputs(start, stop)
        if not all(isinstance(n.meta["example_value"], torch.Tensor) for n in outputs):
            return False
        inputs = list(dict.fromkeys(operands_of(nodes[0])))
        passed = frozenset(i for i, node in enumerate(inputs) if node in self._position)
        self._add_piece(start, stop, (inputs, outputs), passed, (start,), call=nodes[0])
        self._add_step(inputs, outputs)
        return True
