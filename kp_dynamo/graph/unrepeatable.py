"""Values that a second run may change: random numbers, and the results of user-defined operators.

A user-defined operator may count its calls or read a Python variable, so that a second run in the backward would double
its side effects and differentiate another function.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.pure_operators import is_user_defined
from kp_dynamo.graph.sizes import node_bytes


def save_unrepeatable(graph: fx.Graph) -> bool:
    """Tag the unrepeatable nodes of a joint graph, and what is saved with them, as always saved.

    The partitioner would recompute them under `activation_memory_budget` < 1. Inside `torch.utils.checkpoint` it would
    draw random numbers again. User-defined operators do run again there, as in eager.

    This is no pass: it belongs to a call of the partitioner, for a program or for an estimate, and no option may
    disable it. It changes no node, only the partitioner's tags.

    Returns:
        Whether there are any.
    """
    backward, is_any = backward_nodes(graph), False
    for node in graph.nodes:
        if node in backward or not is_unrepeatable(node):
            continue
        is_any = True
        for saved in (node, *(u for u in node.users if u not in backward and _is_saved_with(u, node))):
            if is_random(node) or "recompute" not in saved.meta:
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return is_any


def is_always_saved(node: fx.Node) -> bool:
    """Whether a node is unrepeatable, one of several results of such a node, or a mask computed from random numbers."""
    return is_unrepeatable(node) or any(is_unrepeatable(s) and _is_saved_with(node, s) for s in node.all_input_nodes)


def is_unrepeatable(node: fx.Node) -> bool:
    """Whether a node draws random numbers or calls a user-defined operator."""
    return is_random(node) or is_user_defined(node.target)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_saved_with(user: fx.Node, node: fx.Node) -> bool:
    return user.target is operator.getitem or (is_random(node) and node_bytes(user) < node_bytes(node))
