"""The pass `gate_weight_gradients`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.waiting import insert_wait
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.order.gradient_flow import GradientFlow

_MIN_BYTES = 8 * 2**20


@dataclass(frozen=True)
class GateWeightGradients:
    """Compute the weight gradients of a layer before the backward goes on with the layer in front of it.

        before                                    after
        d_x = d_h @ w                             d_x = d_h @ w
        d_g = front_backward(d_x)                 d_w = d_h.T @ x
        ...                                       wait = kp.wait_for_all([d_w, d_x])
        d_w = d_h.T @ x                           d_w_1, d_x_1 = wait[0], wait[1]
        return ..., d_w                           d_g = front_backward(d_x_1)
                                                  ...
                                                  return ..., d_w_1

    No operator reads a weight gradient, so the scheduler of a TPU's compiler runs all of them last. Until then, their
    operands keep vector memory or HBM occupied, and attention's scores no longer fit into vector memory.

    Fires where

    1. a single gradient is all that the rest of the backward takes, apart from casts and views of it, as between the
       parts of a residual block;
    2. a weight gradient since the last such place has at least 8 MiB, as in the MLP of a layer. Where only attention's
       gradients wait, there is less to do while operands are copied to vector memory: a T5 takes 4.96 instead of 4.54
       modelled ms on a v5e.

    Leaves alone

    3. places where several gradients meet, such as the skips of a U-Net;
    4. the weight gradients of convolutions: with them, a v5e's compiler models 3.74 instead of 3.66 ms for a ResNet-50.

    Values do not change, nor does anything on XLA:CPU and on several devices (`ops/optimization_barrier.py`).
    """

    name: ClassVar[str] = "gate_weight_gradients"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        gates = list(_gates(GradientFlow(gm.graph)))
        for gate in gates:
            gate.insert(gm.graph)
        return PassReport(self.name, len(gates))


@dataclass(frozen=True)
class _Gate:
    """Where a backward waits: for `results` and `passed`, the gradient that everything from `before` on reads."""

    results: tuple[fx.Node, ...]
    passed: tuple[fx.Node, ...]
    before: fx.Node

    def insert(self, graph: fx.Graph) -> None:
        later = _from(self.before)
        for node in _needed_for(self.results, later):
            self.before.prepend(node)
        with graph.inserting_before(self.before):
            gated = insert_wait(graph, torch.ops.kp.wait_for_all.default, (*self.results, *self.passed))
        readers = set(_from(self.before))
        for source, waiting in zip((*self.results, *self.passed), gated, strict=True):
            source.replace_all_uses_with(waiting, delete_user_cb=readers.__contains__)


def _gates(flow: GradientFlow) -> Iterator[_Gate]:
    last, gradients = -1, {node: read for node, read in flow.results.items() if not _is_of_convolution(node)}
    for place, value in flow.narrow_places():
        results = tuple(node for node, read in gradients.items() if last < read <= place)
        last = place
        if max(map(node_bytes, results), default=0) < _MIN_BYTES:
            continue
        passed = flow.read_after(place, value)
        if all(tensor_of(node) is not None for node in passed):
            yield _Gate(results, passed, before=flow.shared[place + 1])


def _is_of_convolution(gradient: fx.Node) -> bool:
    while gradient.target in (*VIEWS_AND_CASTS, operator.getitem):
        gradient = gradient.all_input_nodes[0]
    return gradient.target is torch.ops.aten.convolution_backward.default


def _from(start: fx.Node) -> list[fx.Node]:
    """The nodes of the graph from `start` on."""
    found = [start]
    while found[-1].op != "output":
        found.append(found[-1].next)
    return found


def _needed_for(results: tuple[fx.Node, ...], later: list[fx.Node]) -> list[fx.Node]:
    """Those of `later` that `results` need."""
    needed = set(results)
    for node in reversed(later):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in later if node in needed]
