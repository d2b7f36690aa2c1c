"""The pass `checkpoint_auto`, named after the option that selects it; see `recompute/__init__.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.recompute.budget import Budget, fitted


@dataclass(frozen=True)
class RecomputeToBudget:
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
