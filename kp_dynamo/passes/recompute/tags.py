"""The tags of a joint graph that tell the partitioner what to save."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.saved_values import ForwardPart
from kp_dynamo.passes.recompute.policies import FreedValue

_NO_REGION = 0  # of the user's checkpoints: theirs are numbered from 1


def tag(nodes: Iterable[fx.Node], policy: CheckpointPolicy) -> int:
    """Tag those nodes that have no tag yet, from the user's own checkpoints or a pass; return their number."""
    new = [node for node in nodes if "recompute" not in node.meta]
    for node in new:
        node.meta |= {"recompute": policy, "ac_graph_id": _NO_REGION}
    return len(new)


def tag_all(part: ForwardPart) -> int:
    """Save exactly what a forward part says is saved; return the number of recomputed nodes."""
    tag(part.saved, CheckpointPolicy.MUST_SAVE)
    return tag((n for n in part.nodes if n.op == "call_function"), CheckpointPolicy.MUST_RECOMPUTE)


def untag(nodes: Iterable[fx.Node]) -> None:
    """Remove the tags."""
    for node in nodes:
        del node.meta["recompute"], node.meta["ac_graph_id"]


def tag_recompute(steps: Iterable[FreedValue]) -> list[fx.Node]:
    """Tag the nodes that steps recompute, and leave the rest to the partitioner; return the newly tagged nodes."""
    new = [node for step in steps for node in step.recomputed_nodes if "recompute" not in node.meta]
    tag(new, CheckpointPolicy.MUST_RECOMPUTE)
    return new
