"""The arguments of a call of `kp::attention`, `kp::attention_train` or `kp::attention_backward`, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.ops import attention as _attention  # noqa: F401  # registers the operators
from kp_dynamo.ops.attention_scoring import NUM_SCORING, Scoring
from kp_dynamo.ops.dropout_mask import Dropout

_backward = torch.ops.kp.attention_backward
_BACKWARDS = _backward.default, _backward.bias, _backward.sinks


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of a call in a graph, or of a call that a pass retraces: their tensors are nodes, or padded values.

    Attributes:
        q: Queries, [N, S, D].
        k: Keys, [M, D, T]; M < N if heads share them.
        v: Values, [M, T, E].
        scoring: How the scores are computed.
        backward: What only the backward takes; None for the two others.
        dropout: The dropout of the probabilities, or None.
    """

    q: Any
    k: Any
    v: Any
    scoring: Scoring
    backward: BackwardArgs | None = None
    dropout: Dropout | None = None

    @classmethod
    def of(cls, call: Any) -> AttentionArgs:
        """The arguments of a node, or of anything else with a `target` and `args`."""
        if call.target not in _BACKWARDS:
            q, k, v, *rest = call.args
            backward, optional = None, rest[NUM_SCORING:]
        else:
            grad, q, k, v, result, statistics, *rest = call.args
            q_factor, k_factor, *optional = rest[NUM_SCORING:]
            backward = BackwardArgs(grad, result, statistics, (q_factor, k_factor))
        return cls(q, k, v, Scoring(*rest[:NUM_SCORING], *optional[2:]), backward, _dropout(*optional[:2]))

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
        return *self.operands, *self.scoring.in_order, *self.last

    @property
    def last(self) -> tuple[Any, ...]:
        """The arguments after those of the scoring."""
        key, rate = (None, 0.0) if self.dropout is None else (self.dropout.key, self.dropout.rate)
        if self.scoring.sinks is not None:
            return *self.factors, key, rate, self.scoring.soft_cap, self.scoring.sinks
        if self.scoring.soft_cap:
            return *self.factors, key, rate, self.scoring.soft_cap
        return self.factors if key is None else (*self.factors, key, rate)


def _dropout(key: Any = None, rate: float = 0.0) -> Dropout | None:
    return None if key is None else Dropout(key, rate)


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
