"""Inserts gathers of weights, and of their gradients, into a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import kp_dynamo.ops.gathered  # noqa: F401  # registers the operator
from kp_dynamo.graph.editing import cast_to, insert_call
from kp_dynamo.graph.nodes import backward_nodes, fake_of
from kp_dynamo.graph.op_tables import MATMULS, VIEWS_AND_CASTS
from kp_dynamo.graph.weight_matmuls import DividedWeight, axes_in, has_many_rows, path_to_matmul, path_to_source
from kp_dynamo.passes.precision.cast_nodes import is_float32
from kp_dynamo.passes.precision.matmul_rules import ONE_PASS
from kp_dynamo.passes.recompute.tags import tag

kp = torch.ops.kp


class Gathering:
    """The gathers of a graph.

    Args:
        graph: The graph.
        weights: Its inputs that are weights.
        num_parts: Among how many chips other axes divide them.

    Attributes:
        num_gathered: How many there are.
    """

    def __init__(self, graph: fx.Graph, weights: Mapping[fx.Node, DividedWeight], num_parts: int) -> None:
        self._graph, self._weights, self._num_parts = graph, weights, num_parts
        self._backward = backward_nodes(graph)
        self._whole: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.num_gathered = 0

    def gather_operand(self, matmul: fx.Node, position: int) -> None:
        """Gather what an operand is a view of, if that is a weight."""
        path = path_to_source(matmul.args[position])
        weight = self._weights.get(path[-1])
        if weight is not None and weight.is_along_batch and has_many_rows(matmul, path[0]):
            self._gather(matmul, path, weight)

    def gather_head(self, loss: fx.Node) -> None:
        """Gather the weight of a fused loss on a mesh with another axis. If all are along the batch, it does so itself.

        Chips that divide the classes compute the same blocks of their part.
        """
        path = path_to_source(loss.args[MATMULS[loss.target][1]])
        weight = self._weights.get(path[-1])
        axes = None if weight is None else axes_in(path[0], path[-1], weight.axes, self._num_parts)
        if weight is None or not axes:
            return
        if axes[0]:
            loss.kwargs = {**loss.kwargs, "parts": self._num_parts}
        if weight.is_along_batch:
            self._gather(loss, path, weight)
            is_backward = loss.target is kp.linear_cross_entropy_backward.default
            for gradient in [user for user in loss.users if is_backward and user.args[1] == 1]:
                self._gather_result(gradient, axes)

    def gather_gradient(self, gradient: fx.Node, weight: DividedWeight) -> None:
        """Gather the result of the matmul that computes the gradient of a weight."""
        path = path_to_matmul(gradient) if weight.is_along_batch else None
        axes = None if path is None else axes_in(path[-1], gradient, weight.axes, self._num_parts)
        if path is not None and axes is not None:
            self._gather_result(path[-1], axes)

    def _gather(self, reader: fx.Node, path: list[fx.Node], weight: DividedWeight) -> None:
        """Let an operator read the whole of a weight: of its casts and views in `path`, of the first narrowest one."""
        source = min(reversed(path), key=lambda node: fake_of(node).dtype.itemsize)
        axes, read = (axes_in(node, path[-1], weight.axes, self._num_parts) for node in (source, path[0]))
        if axes is None or read is None:
            return
        after = path[: path.index(source)]
        whole = self._gathered(source, axes, rounds=is_float32(source) and bool(reader.meta.get(ONE_PASS)))
        (after[-1] if after else reader).replace_input_with(source, whole)
        self._recompute(node for node in after if node.target in VIEWS_AND_CASTS)

    def _gather_result(self, result: fx.Node, axes: tuple[str, ...]) -> None:
        with self._graph.inserting_after(result):
            whole = self._insert(result, axes)
        result.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)

    def _gathered(self, source: fx.Node, axes: tuple[str, ...], *, rounds: bool) -> fx.Node:
        """The whole of a value; with `rounds`, of its bfloat16, as the matrix unit would round it."""
        key = source, rounds
        if key not in self._whole:
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            place = first if source.op == "placeholder" else source.next
            with self._graph.inserting_before(place):
                narrow = cast_to(source, torch.bfloat16, like=None) if rounds else source
                whole = self._insert(narrow, axes)
                wide = cast_to(whole, torch.float32, like=None) if rounds else whole
            self._recompute({narrow, whole, wide} - {source})
            self._whole[key] = wide
        return self._whole[key]

    def _insert(self, source: fx.Node, axes: tuple[str, ...]) -> fx.Node:
        self.num_gathered += 1
        like = None if source.op == "placeholder" else source
        args = (source, ",".join(axes)) if axes else (source,)
        return insert_call(self._graph, kp.gathered.default, args, {}, like=like)

    def _recompute(self, nodes: Iterable[fx.Node]) -> None:
        tag((n for n in nodes if self._backward and n not in self._backward), CheckpointPolicy.MUST_RECOMPUTE)
