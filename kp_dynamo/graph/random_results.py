"""Random numbers are drawn once: drawing them again in the backward would give different values."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.sizes import node_bytes


def save_random_results(graph: fx.Graph) -> bool:
    """Tag the random nodes of a joint graph, and the smaller masks computed from them, as always saved.

    The partitioner would recompute them under `activation_memory_budget` < 1 and inside `torch.utils.checkpoint`.

    This is no pass: it belongs to a call of the partitioner, for a program or for an estimate, and no option may
    disable it. It changes no node, only the partitioner's tags.

    Returns:
        Whether there are any.
    """
    backward, is_any = backward_nodes(graph), False
    for node in graph.nodes:
        if node in backward or not is_random(node):
            continue
        is_any = True
        masks = [u for u in node.users if u not in backward and node_bytes(u) < node_bytes(node)]
        for saved in (node, *masks):
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return is_any


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
