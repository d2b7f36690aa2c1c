"""Gradients that eager leaves None: those of inputs that reach only results outside the loss.

AOTAutograd's backward is one function of the gradients of all results. Autograd passes zeros for undefined ones, and
every input gets a gradient. The joint graph shows which gradients depend on which results: hooks on the node of the
backward see which gradients are undefined, and drop the gradients that depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType

from kp_dynamo.graph.nodes import called_name, is_tangent, primal_inputs

_WITH_TANGENT = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
_ZEROS = ("angle", "copysign", "sgn", "sign")


class UndefinedGradients:
    """Which gradients of a joint graph are undefined if the gradients of some results are.

    Args:
        joint: The joint graph, as AOTAutograd traced it.
        metadata: AOTAutograd's metadata of the graph.
        num_returned: Number of its results; the gradients of its inputs follow them.
        captured: Dynamo's graph, in which each user function with its own backward is one node.
    """

    def __init__(self, joint: fx.GraphModule, metadata: Any, num_returned: int, captured: fx.Graph) -> None:
        tangents = [n for n in joint.graph.find_nodes(op="placeholder") if is_tangent(n)]
        results = [] if metadata is None else _results_with_tangents(metadata)
        self._gradients: list[frozenset[int] | None] = []
        if len(results) == len(tangents) > 1:
            needed = _reaching_sources(joint.graph, dict(zip(tangents, results, strict=True)))
            output = joint.graph.output_node().args[0]
            assert isinstance(output, (list, tuple))
            primals = primal_inputs(joint.graph)
            # Autograd only sees tensors, but the graph inputs include sizes.
            every_pair = zip(primals, output[num_returned:], strict=False)
            pairs = [(n, g) for n, g in every_pair if isinstance(n.meta.get("val"), torch.Tensor)]
            led_to = _Reach(joint.graph, output, results)
            by_function = _through_functions(captured, primals, len(metadata.mutated_inp_runtime_indices))
            self._gradients = [
                (needed[g] or led_to(n)) | (by_function.get(n, frozenset()) & set(results))
                if isinstance(g, fx.Node)
                else None
                for n, g in pairs
            ]
        every = frozenset(results)
        self.is_uniform = all(found is None or found == every for found in self._gradients)

    @property
    def needed(self) -> list[list[int] | None]:
        """For each gradient, the results that it depends on; None for one that does not exist. As plain values."""
        return [None if found is None else sorted(found) for found in self._gradients]

    @classmethod
    def of(cls, needed: Sequence[Sequence[int] | None], *, is_uniform: bool) -> UndefinedGradients:
        """Those of a graph that another process has traced.

        Args:
            needed: As the property.
            is_uniform: Whether every gradient depends on every result.
        """
        known = cls.__new__(cls)
        known._gradients = [None if found is None else frozenset(map(int, found)) for found in needed]
        known.is_uniform = is_uniform
        return known

    def watch(self, node: Any) -> None:
        """Let the backward of one call, which is `node`, leave undefined what only depends on undefined gradients."""
        undefined: set[int] = set()

        def before(gradients: Sequence[Any]) -> None:
            undefined.clear()
            undefined.update(i for i, gradient in enumerate(gradients) if gradient is None)

        def after(gradients: Sequence[Any], _: Any) -> tuple[Any, ...] | None:
            if not undefined or len(gradients) != len(self._gradients):
                return None
            pairs = zip(gradients, self._gradients, strict=True)
            return tuple(None if needed is not None and needed <= undefined else g for g, needed in pairs)

        node.register_prehook(before)
        node.register_hook(after)


def _results_with_tangents(metadata: Any) -> list[int]:
    """The results of the forward that have a tangent, in the order of the tangents."""
    written = metadata.mutated_inp_runtime_indices
    infos = [metadata.input_info[i] for i in written]
    first, count = len(written), len(metadata.output_info)
    found = [i for i, info in enumerate(infos) if info.mutates_data and info.requires_grad]
    for i, info in enumerate(metadata.output_info):
        is_tensor = isinstance(info.raw_type, type) and issubclass(info.raw_type, torch.Tensor)
        if info.output_type in _WITH_TANGENT and is_tensor and info.requires_grad:
            found.append(first + i)
    return [*found, *(first + count + i for i in range(metadata.num_intermediate_bases))]


def _reaching_sources(graph: fx.Graph, sources: dict[fx.Node, int]) -> dict[fx.Node, frozenset[int]]:
    """Node -> the numbers of the sources that it depends on."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own = frozenset([sources[node]]) if node in sources else frozenset()
        found[node] = own.union(*(found[source] for source in node.all_input_nodes))
    return found


def _through_functions(captured: fx.Graph, primals: Sequence[fx.Node], first: int) -> dict[fx.Node, frozenset[int]]:
    """Input -> the results that it reaches through a function with its own backward, or with gradients of zeros.

    Autograd calls that backward if one of the function's results has a gradient, with zeros for the others, so all its
    inputs get a gradient.

    Args:
        captured: Dynamo's graph.
        primals: The inputs of the joint graph.
        first: The number of Dynamo's first result among those of the joint graph.
    """
    inputs = captured.find_nodes(op="placeholder")
    functions = [node for node in captured.nodes if _has_own_backward(node) or _gives_zeros(node)]
    output = captured.output_node().args[0]
    if not functions or len(inputs) != len(primals) or not isinstance(output, (list, tuple)):
        return {}
    reaching = _reaching_sources(captured, {node: i for i, node in enumerate((*inputs, *functions))})
    found: dict[fx.Node, frozenset[int]] = {}
    for number, function in enumerate(functions, len(inputs)):
        results = frozenset(first + i for i, r in enumerate(output) if isinstance(r, fx.Node) and number in reaching[r])
        for i in reaching[function]:
            if i < len(inputs):
                found[primals[i]] = found.get(primals[i], frozenset()) | results
    return found


def _has_own_backward(node: fx.Node) -> bool:
    """Whether a node calls an `autograd.Function` or a user-defined operator."""
    is_operator = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims")
    return is_operator or is_autograd_function(node)


def _gives_zeros(node: fx.Node) -> bool:
    """Whether a node's gradients are zeros that the joint graph makes without the gradient of its result."""
    value = node.meta.get("example_value")
    is_named = called_name(node).split(".")[0].rstrip("_") in _ZEROS
    return is_named and isinstance(value, torch.Tensor) and value.requires_grad


def is_autograd_function(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph calls an `autograd.Function`."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "autograd_function_apply"


class _Reach:
    """The results that an input reaches: if one has a gradient, eager may define one of zeros (`copysign`'s second)."""

    def __init__(self, graph: fx.Graph, output: Sequence[Any], results: Sequence[int]) -> None:
        self._graph, self._output, self._results = graph, output, results

    def __call__(self, primal: fx.Node) -> frozenset[int]:
        reaching = _reaching_sources(self._graph, {primal: 0})
        named = ((r, self._output[r]) for r in self._results if r < len(self._output))
        return frozenset(r for r, node in named if isinstance(node, fx.Node) and reaching[node])
