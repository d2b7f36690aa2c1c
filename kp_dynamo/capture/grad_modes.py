"""Where Dynamo's graph changes the grad mode. A copy or view of a tensor that `no_grad` made passes no gradient on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

import torch
from torch import fx

_CHANGES = (
    torch._C._set_grad_enabled, torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)  # fmt: skip


def before_a_change(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """These nodes, up to the first that changes the grad mode."""
    return takewhile(lambda node: node.target not in _CHANGES, nodes)
