"""The plan of `sharding="tensor"` for a model that brings none: the pairs of matmuls that its graphs have.

`graph/matmul_pairs.py` has the rules. The model is called on fake tensors, in inference, with a batch of one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kp_dynamo.aot.resized_inputs import batch_of, resized
from kp_dynamo.aot.step_graphs import StepGraphs, graphs_of_step
from kp_dynamo.graph.matmul_pairs import divided_dims
from kp_dynamo.sharding.fsdp import SMALL
from kp_dynamo.sharding.mesh import MODEL, NamedMesh
from kp_dynamo.sharding.rules import own_plan

logger = logging.getLogger(__name__)
# Each operator of the model as itself: no pass has fused or divided anything.
_PLAIN = {"level": "conservative", "precision": "float32", "checkpoint": "off", "blocks": "off"}


@dataclass
class MatmulPairs:
    """The pairs of matmuls of one model.

    Attributes:
        model: A module, on any device.
        args: Its arguments.
    """

    model: nn.Module
    args: Sequence[Any]
    _step: StepGraphs | None = None
    _plans: dict[int, dict[str, tuple[str | None, ...]]] = field(default_factory=dict)

    def plan(self, count: int) -> dict[str, tuple[str | None, ...]]:
        """The placement of each parameter of a pair that divides among `count` chips, by its path.

        Raises:
            TPUConfigurationError: The arguments have no batch.
            XLACompilationError: The model cannot be traced.
        """
        if count not in self._plans:
            self._step = self._step or graphs_of_step(self.model, resized(self.args, 1), _PLAIN, False)
            self._plans[count] = _plan(self._step, count)
        return self._plans[count]


def needed_plan(
    model: Any, args: Sequence[Any] | None, mesh: NamedMesh, sharding: Any, name: str = "args"
) -> dict[str, tuple[str | None, ...]] | None:
    """The plan of a model that needs one for this sharding; None if it needs none, or there are no arguments.

    `name` is what the caller's user calls the arguments.

    Raises:
        TPUConfigurationError: The arguments have no batch.
        XLACompilationError: The model cannot be traced.
    """
    if not isinstance(sharding, str) or "tensor" not in sharding or args is None:
        return None
    if not isinstance(model, nn.Module) or own_plan(model) or not mesh.has(MODEL):
        return None
    batch_of(args, name)
    found = MatmulPairs(model, args).plan(mesh.size(MODEL))
    logger.info("sharding=%r divides these parameters of a %s: %s", sharding, type(model).__name__, found)
    return found


def _plan(step: StepGraphs, count: int) -> dict[str, tuple[str | None, ...]]:
    names = {id(p): (name, p.dim()) for name, p in step.model.named_parameters()}
    found: dict[str, tuple[str | None, ...]] = {}
    reads = Counter(name for call in step.calls for name in {names[id(a)][0] for a in call.args if id(a) in names})
    for call in step.calls:
        nodes = call.gm.graph.find_nodes(op="placeholder")
        known: Mapping[Any, tuple[str, int]] = {
            node: names[id(a)] for node, a in zip(nodes, call.args, strict=True) if id(a) in names
        }
        for node, dim in divided_dims(call.gm.graph, known, count, SMALL).items():
            name, rank = known[node]
            found[name] = tuple(MODEL if d == dim else None for d in range(rank))
    # Two graphs may need different parts of a parameter.
    return {name: placement for name, placement in found.items() if reads[name] == 1}
