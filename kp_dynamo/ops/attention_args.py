"""The arguments of a call of `kp::attention`, `kp::attention_train` or `kp::attention_backward`, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.ops import attention as _attention  # noqa: F401  # registers the operators
from kp_dynamo.ops.attention_forms import Scoring


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of a call in a graph, or of a call that a pass retraces: their tensors are nodes, or padded values.

    Attributes:
        q: Queries, [N, S, D].
        k: Keys, [N, D, T].
        v: Values, [N, T, E].
        scoring: How the scores are computed.
        backward: What only the backward takes; None for the two others.
    """

    q: Any
    k: Any
    v: Any
    scoring: Scoring
    backward: BackwardArgs | None = None

    @classmethod
    def of(cls, call: Any) -> AttentionArgs:
        """The arguments of a node, or of anything else with a `target` and `args`."""
        if call.target is not torch.ops.kp.attention_backward.default:
            q, k, v, *scoring = call.args
            return cls(q, k, v, Scoring(*scoring))
        grad, q, k, v, result, statistics, *scoring, q_factor, k_factor = call.args
        return cls(q, k, v, Scoring(*scoring), BackwardArgs(grad, result, statistics, (q_factor, k_factor)))

    @property
    def operands(self) -> tuple[Any, ...]:
        """The tensors without the masks, in the order of the operator."""
        if self.backward is None:
            return self.q, self.k, self.v
        return self.backward.grad, self.q, self.k, self.v, self.backward.result, self.backward.statistics

    @property
    def factors(self) -> tuple[float, ...]:
        """The last two arguments of the backward; the two others have none."""
        return () if self.backward is None else self.backward.factors

    @property
    def in_order(self) -> tuple[Any, ...]:
        """The arguments as the operator takes them."""
        return *self.operands, *self.scoring.in_order, *self.factors


@dataclass(frozen=True)
class BackwardArgs:
    """Arguments of `kp::attention_backward` alone.

    Attributes:
        grad: Gradient of the result, [N, S, E].
        result: What the forward returned, [N, S, E].
        statistics: What the forward saved, [2, N, S].
        factors: The numbers that the gradients of q and of k are multiplied by.
    """

    grad: Any
    result: Any
    statistics: Any
    factors: tuple[float, float]
