"""`kp::recurrence` and its backward: time steps in the tail leave the states, and their gradients, as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kp_dynamo.passes.padding.atoms import Atoms, Padded, Refused, has_tail, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import rule

kp = torch.ops.kp

_OF_STEPS = "tb_"  # a state has no time: "b_"


@rule(kp.recurrence.default, layouts={"gates": _OF_STEPS, "states": _OF_STEPS})
def _recurrence(call: Call) -> list[Padded]:
    """Batch rows are independent, so their tails stay tails."""
    cell, gates, states, weights, reverse, train = call.args[:6]
    time, batch, _ = gates.dims
    _require_whole_features([gates, *states], weights)
    results = call.run(cell, gates, states, weights, reverse, train, _mask(call, time))
    return _as_steps(results, time, batch)


@rule(kp.recurrence_backward.default, layouts={"gradients": _OF_STEPS, "steps": _OF_STEPS})
def _recurrence_backward(call: Call) -> list[Padded]:
    """The gradients of the gates are 0 at steps in the tail."""
    cell, gradients, steps, weights, reverse = call.args[:5]
    time, batch, _ = gradients[0].dims
    _require_whole_features([*gradients, *steps], weights)
    results = call.run(cell, gradients, steps, weights, reverse, _mask(call, time))
    return _as_steps(results, time, batch)


def _mask(call: Call, time: Atoms) -> torch.Tensor | None:
    return call.masks.is_true(time) if has_tail(time) else None


def _as_steps(results: Sequence[torch.Tensor], time: Atoms, batch: Atoms) -> list[Padded]:
    dims = {3: (time, batch), 2: (batch,)}
    return [Padded(x, (*dims[x.ndim], *plain(x.shape[-1:]))) for x in results]


def _require_whole_features(values: Sequence[Padded], weights: Sequence[Padded]) -> None:
    """Refuse a tail in the size of an input or of a state: every step would sum over it."""
    features = [*(x.dims[-1] for x in values), *(atoms for weight in weights for atoms in weight.dims)]
    if any(map(has_tail, features)):
        raise Refused("the size of an input, or of a state, of a recurrent layer is padded")
