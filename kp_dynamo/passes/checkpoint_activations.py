"""Recompute activations in the backward instead of saving them: gradient checkpointing.

These passes leave the graph unchanged. They tag nodes of the forward part as `torch.utils.checkpoint` does
(`node.meta["recompute"]`), and the min-cut partitioner acts on the tags. Without tags it saves what is cheapest to
read. Random values are always saved. Nodes that the user's own checkpoints have tagged keep their tags.

"attention"  recomputes scores and probabilities [B, H, S, S]; the partitioner decides the rest.
"blocks"     saves the sums x + f(x) and recomputes everything else.
0..1         keeps this share of the bytes that the partitioner would save: the values most expensive to recompute.
"auto"       recomputes as little as fits: nothing, if the estimated peak is within the budget.

A share and "auto" drop saved values one by one, the most bytes per operation first. A value that one of them
recomputes is free for the next ones. The sums at the ends of blocks go last, because a segment ends after each.
docs/checkpointing.md has the figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.saved_values import ForwardPart, saved_by_min_cut
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.passes.base import PassReport, Refusal, reported
from kp_dynamo.passes.recompute.budget import Budget, fitted
from kp_dynamo.passes.recompute.policies import (
    Step,
    attention_scores,
    cheapest_first,
    depends_on_rng,
    residual_sums,
)
from kp_dynamo.passes.recompute.tags import tag, tag_all, tag_recompute

_MIB = 2**20


@dataclass(frozen=True)
class CheckpointAttention:
    """`checkpoint="attention"`: recompute the scores of attention in the backward, and nothing else."""

    name: ClassVar[str] = "checkpoint_attention"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        return PassReport(
            self.name, tag(attention_scores(ForwardPart(gm.graph, ()).nodes), CheckpointPolicy.MUST_RECOMPUTE)
        )


@dataclass(frozen=True)
class CheckpointBlocks:
    """`checkpoint="blocks"`: save the sums at the ends of residual blocks, and recompute the rest."""

    name: ClassVar[str] = "checkpoint_blocks"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        part = ForwardPart(gm.graph, ())
        ends = residual_sums(part.nodes)
        if not ends:
            reason = "no sum x + f(x) ends a block. Try: a share of 0 to 1 of the activations to keep"
            return PassReport(self.name, 0, reported([Refusal(gm.graph.output_node(), reason)]))
        part.saved = dict.fromkeys([*ends, *(n for n in part.nodes if depends_on_rng(n))])
        note = f"saves the sums at the ends of {len(ends)} blocks, {sum(map(node_bytes, ends)) / _MIB:.1f} MiB"
        return PassReport(self.name, tag_all(part), notes=(note,))


@dataclass(frozen=True)
class CheckpointShare:
    """`checkpoint=share`: recompute the cheapest values, until only a share of the activation bytes is saved.

    Attributes:
        share: 0 to 1, of the bytes that the partitioner would save.
    """

    share: float

    name: ClassVar[str] = "checkpoint_share"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        part = ForwardPart(gm.graph, saved_by_min_cut(gm))
        before, ends = part.saved_bytes(), set(residual_sums(part.nodes))
        order = itertools.chain(cheapest_first(part, lambda n: n in ends), cheapest_first(part, lambda n: False))
        steps, after = self._drop_to_share(gm, part, order)
        if not steps:
            return PassReport(self.name, 0)
        note = f"saves {after / _MIB:.1f} of {before / _MIB:.1f} MiB and recomputes {_gflop(steps)} GFLOP"
        return PassReport(self.name, sum(len(s.recomputed_nodes) for s in steps), notes=(note,))

    def _drop_to_share(self, gm: fx.GraphModule, part: ForwardPart, order: Iterator[Step]) -> tuple[list[Step], int]:
        """Tag until the partitioner saves at most the share; return the steps taken and the bytes that it saves."""
        steps: list[Step] = []
        after = before = part.saved_bytes()
        while after > self.share * before:
            wanted = part.saved_bytes() - (after - self.share * before)
            new = list(_until(order, part, wanted))
            if not new:
                break
            tag_recompute(new)
            steps += new
            after = ForwardPart(gm.graph, saved_by_min_cut(gm)).saved_bytes()
        return steps, after


def _until(order: Iterator[Step], part: ForwardPart, wanted: float) -> Iterator[Step]:
    while part.saved_bytes() > wanted and (step := next(order, None)) is not None:
        yield step


def _gflop(steps: list[Step]) -> str:
    return f"{sum(s.flops for s in steps) / 1e9:.2f}"


@dataclass(frozen=True)
class CheckpointAuto:
    """`checkpoint="auto"`: recompute the cheapest values, until the peak of memory fits a budget.

    Attributes:
        budget: The available memory, and whether it is a hard limit.
    """

    budget: Budget

    name: ClassVar[str] = "checkpoint_auto"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        if not backward_nodes(gm.graph):
            return PassReport(self.name, 0)
        return fitted(gm, self.name, self.budget)
