"""Losses that count their targets themselves. The others are taken apart: sums and true counts do the rest."""

from __future__ import annotations

from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Padded, Refused, has_tail
from kp_dynamo.passes.padding.rules import Call, aten, rule

_NONE = 0  # reduction="none"


def _inputs(call: Call, x: Padded, target: Padded, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores without a tail, and targets that are to be ignored in theirs."""
    classes = 0 if len(x.dims) == 1 else 1
    if has_tail(x.dims[classes]):
        raise Refused("the classes of a loss are padded")
    return call.masks.cleared(x), call.masks.cleared(target, ignored)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(call: Call) -> tuple[Padded, Padded]:
    x, target, weight, reduction, ignored = call.args
    loss, total = call.run(*_inputs(call, x, target, ignored), weight, reduction, ignored)
    return Padded(loss, target.dims if reduction == _NONE else ()), Padded(total, ())


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(call: Call) -> Any:
    gradient, x, target, weight, reduction, ignored, total = call.args
    scores, targets = _inputs(call, x, target, ignored)
    return x.replaced(call.run(call.masks.cleared(gradient), scores, targets, weight, reduction, ignored, total))
