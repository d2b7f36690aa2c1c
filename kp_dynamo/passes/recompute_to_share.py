"""The pass `checkpoint_share`, named after the option that selects it; see `recompute/__init__.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.saved_values import ForwardPart, saved_by_min_cut
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.recompute.policies import FreedValue, cheapest_first, residual_sums
from kp_dynamo.passes.recompute.tags import tag_recompute

_MIB = 2**20


@dataclass(frozen=True)
class RecomputeToShare:
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

    def _drop_to_share(
        self, gm: fx.GraphModule, part: ForwardPart, order: Iterator[FreedValue]
    ) -> tuple[list[FreedValue], int]:
        """Tag until the partitioner saves at most the share; return the steps taken and the bytes that it saves."""
        steps: list[FreedValue] = []
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


def _until(order: Iterator[FreedValue], part: ForwardPart, wanted: float) -> Iterator[FreedValue]:
    while part.saved_bytes() > wanted and (step := next(order, None)) is not None:
        yield step


def _gflop(steps: list[FreedValue]) -> str:
    return f"{sum(s.flops for s in steps) / 1e9:.2f}"
