"""Random numbers are drawn once: a backward that draws them again gets others."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.passes.base import backward_nodes, tensor_of


def save_random_results(graph: fx.Graph) -> None:
    """Tag the random nodes of a joint graph, and the smaller masks made of them, as saved and never recomputed.

    The partitioner would recompute them under `activation_memory_budget` < 1 and inside `torch.utils.checkpoint`.
    """
    backward = backward_nodes(graph)
    for node in graph.nodes:
        if node in backward or not is_random(node):
            continue
        masks = [u for u in node.users if u not in backward and _num_bytes(u) < _num_bytes(node)]
        for saved in (node, *masks):
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _num_bytes(node: fx.Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.element_size() * int(torch.fx.experimental.symbolic_shapes.hint_int(tensor.numel(), fallback=1))
