"""The pass `checkpoint_blocks`, named after the option that selects it; see `recompute/__init__.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.saved_values import ForwardPart
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.step_share import Scope
from kp_dynamo.graph.unrepeatable import is_always_saved
from kp_dynamo.passes.base import PassReport, Refusal, reported
from kp_dynamo.passes.recompute.policies import residual_sums
from kp_dynamo.passes.recompute.tags import tag_all

_MIB = 2**20


@dataclass(frozen=True)
class RecomputeBlocks:
    """`checkpoint="blocks"`: save the sums at the ends of residual blocks, and recompute the rest.

    Attributes:
        scope: What the graph is. A repeated layer saves its inputs only: its result is an input of the next one. So do
            several layers without such a sum. Graphs before and after the layers may have none either.
    """

    scope: Scope = "step"

    name: ClassVar[str] = "checkpoint_blocks"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        part = ForwardPart(gm.graph, ())
        ends = residual_sums(part.nodes) if self.scope != "layer" else []
        if not ends and self.scope == "rest":
            return PassReport(self.name, 0)
        if not ends and self.scope == "step":
            reason = "no sum x + f(x) ends a block. Try: a share of 0 to 1 of the activations to keep"
            return PassReport(self.name, 0, reported([Refusal(gm.graph.output_node(), reason)]))
        part.saved = dict.fromkeys([*ends, *(n for n in part.nodes if is_always_saved(n))])
        if self.scope == "layer" or (self.scope == "layers" and not ends):
            return PassReport(self.name, tag_all(part), notes=("saves the inputs of each layer",))
        note = f"saves the sums at the ends of {len(ends)} blocks, {sum(map(node_bytes, ends)) / _MIB:.1f} MiB"
        return PassReport(self.name, tag_all(part), notes=(note,))
