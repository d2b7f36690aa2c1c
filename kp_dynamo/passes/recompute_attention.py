"""The pass `checkpoint_attention`, named after the option that selects it; see `recompute/__init__.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.saved_values import ForwardPart
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.recompute.policies import attention_scores
from kp_dynamo.passes.recompute.tags import tag


@dataclass(frozen=True)
class RecomputeAttention:
    """`checkpoint="attention"`: recompute the scores of attention in the backward, and nothing else."""

    name: ClassVar[str] = "checkpoint_attention"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        scores = attention_scores(ForwardPart(gm.graph, ()).nodes)
        return PassReport(self.name, tag(scores, CheckpointPolicy.MUST_RECOMPUTE))
