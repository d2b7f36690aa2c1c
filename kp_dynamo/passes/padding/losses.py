"""Losses that count their targets themselves. The others are decomposed into sums and true counts."""

from __future__ import annotations

from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Padded
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.rules import aten, rule

_NONE = 0  # reduction="none"


def _inputs(call: Call, x: Padded, target: Padded, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with cleared tails, and targets with `ignored` in theirs, so that no target selects a tail."""
    return call.masks.cleared(x), call.masks.cleared(target, ignored)


def _cleared(call: Call, weight: Padded | None) -> torch.Tensor | None:
    return None if weight is None else call.masks.cleared(weight)


@rule(aten.nll_loss_forward.default, layouts={"self": "n_", "target": "n"})
@rule(aten.nll_loss2d_forward.default, layouts={"self": "n_hw", "target": "nhw"})
def _nll(call: Call) -> tuple[Padded, Padded]:
    x, target, weight, reduction, ignored = call.args
    loss, total = call.run(*_inputs(call, x, target, ignored), _cleared(call, weight), reduction, ignored)
    return Padded(loss, target.dims if reduction == _NONE else ()), Padded(total, ())


@rule(aten.nll_loss_backward.default, layouts={"grad_output": "n", "self": "n_", "target": "n"})
@rule(aten.nll_loss2d_backward.default, layouts={"grad_output": "nhw", "self": "n_hw", "target": "nhw"})
def _nll_backward(call: Call) -> Any:
    gradient, x, target, weight, reduction, ignored, total = call.args
    scores, targets = _inputs(call, x, target, ignored)
    rest = _cleared(call, weight), reduction, ignored, total
    return x.replaced(call.run(call.masks.cleared(gradient), scores, targets, *rest))
