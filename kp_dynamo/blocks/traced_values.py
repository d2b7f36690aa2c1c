"""The values of Dynamo's graph under the autocast of our trace, where Dynamo computed them under another device's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves

from kp_dynamo.blocks.copies import copied
from kp_dynamo.blocks.pieces import fake_mode
from kp_dynamo.blocks.regions import EXIT_AUTOCAST
from kp_dynamo.blocks.watched_writes import WatchedWrites
from kp_dynamo.capture.capture import Capture
from kp_dynamo.capture.cpu_view import surrounding_autocast
from kp_dynamo.capture.inputs_on_cpu import cpu_fake
from kp_dynamo.capture.xla_autocast import ENTER_AUTOCAST, has_autocast
from kp_dynamo.graph.nodes import called


def are_cast_otherwise(capture: Capture) -> bool:
    """Whether values in Dynamo's graph may have other dtypes than in our trace.

    Dynamo casts by the autocast of the tensors' own device, and we trace on the CPU. `rules_of_xla` leaves out some
    operators for which the two differ.
    """
    if not has_autocast(capture.gm):
        return False
    graphs = [module.graph for module in capture.gm.modules() if isinstance(module, fx.GraphModule)]
    values = tree_leaves([node.meta.get("example_value") for graph in graphs for node in graph.nodes])
    return any(value.device.type != "cpu" for value in values if isinstance(value, torch.Tensor))


def as_traced(capture: Capture) -> Capture | str:
    """`capture` with a copy of its graph, whose values are those of our trace, or why the graph cannot be divided."""
    gm = copied(capture.gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    mode = fake_mode()
    pairs = zip(inputs, capture.inputs, strict=True)
    given = {node: _fresh(node.meta["example_value"], tensor, mode) for node, tensor in pairs}
    try:
        with surrounding_autocast(gm, capture.mode), WatchedWrites() as watch:
            values = _computed(gm, given, mode)
    except Exception as error:  # noqa: BLE001 - any operator of a user may be here; the whole graph reports its error
        return f"under the CPU's autocast, its values cannot be computed: {error}"
    other = next((node for node, value in values.items() if not _agree(value, node.meta["example_value"])), None)
    if other is not None:
        return f"under the CPU's autocast, {other.name} differs from Dynamo's in more than its dtype"
    if _writes_to_shared(inputs, values, watch):
        return "it is under autocast, and writes to an input that shares memory with another"
    for node, value in values.items():
        node.meta["example_value"] = value
    return replace(capture, gm=gm)


def _fresh(value: Any, tensor: Any, mode: FakeTensorMode) -> Any:
    """A new fake CPU tensor like an input: `value` has its symbolic sizes, `tensor` its state before the graph ran."""
    return cpu_fake(value, tensor, mode) if isinstance(value, torch.Tensor) else value


def _computed(gm: fx.GraphModule, given: Mapping[fx.Node, Any], mode: FakeTensorMode) -> dict[fx.Node, Any]:
    """The value of each node that has one in Dynamo's graph."""
    values, is_grad_enabled = dict(given), torch.is_grad_enabled()
    with torch.random.fork_rng(devices=[]), _closing_regions(values), mode, enable_python_dispatcher():
        try:
            for node in gm.graph.nodes:
                if node.op == "get_attr":
                    values[node] = getattr(gm, str(node.target))
                elif node.op not in ("placeholder", "output"):
                    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                    values[node] = called(node, args, kwargs)
        finally:
            torch.set_grad_enabled(is_grad_enabled)
    return {node: value for node, value in values.items() if node.op != "get_attr" and "example_value" in node.meta}


@contextlib.contextmanager
def _closing_regions(values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Leave the autocast regions that are open when an operator raises."""
    try:
        yield
    except Exception:
        entered = {node: value for node, value in values.items() if node.target is ENTER_AUTOCAST}
        for node in [node for node in values if node.target is EXIT_AUTOCAST]:
            entered.pop(node.all_input_nodes[0])
        for region in reversed(entered.values()):
            EXIT_AUTOCAST(region)  # type: ignore[no-untyped-call]
        raise


def _agree(value: Any, known: Any) -> bool:
    """Whether a value differs from Dynamo's only in dtypes, strides and the memory that it shares."""
    (mine, structure), (others, known_structure) = tree_flatten(value), tree_flatten(known)
    return structure == known_structure and all(map(_are_alike, mine, others))


def _are_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and str(one) == str(other)
    is_same = isinstance(other, torch.Tensor) and one.layout is other.layout
    # As text, because to compare symbolic sizes would add a guard.
    return is_same and str(one.shape) == str(other.shape) and one.requires_grad == other.requires_grad


def _writes_to_shared(inputs: Sequence[fx.Node], values: Mapping[fx.Node, Any], watch: WatchedWrites) -> bool:
    """Whether the graph writes to an input that shares memory with another: the inputs of our trace do not."""
    tensors = [(node, node.meta["example_value"]) for node in inputs]
    strided = [(node, t) for node, t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    owners = Counter(tensor.untyped_storage()._cdata for _, tensor in strided)
    return any(
        owners[tensor.untyped_storage()._cdata] > 1 and watch.has_written(values[node]) for node, tensor in strided
    )
