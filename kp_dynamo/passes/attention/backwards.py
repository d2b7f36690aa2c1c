"""The backwards of an attention in a joint graph."""

from __future__ import annotations

import operator

import torch
from torch import fx

_train = torch.ops.kp.attention_train.default
_backward = torch.ops.kp.attention_backward
_BACKWARDS = (_backward.default, _backward.bias, _backward.sinks)


def backwards_of(attention: fx.Node) -> list[fx.Node]:
    """The backward nodes that read the statistics of an attention."""
    if attention.target is not _train:
        return []
    statistics = [user for user in attention.users if user.target is operator.getitem and user.args[1] == 1]
    readers = dict.fromkeys(reader for value in statistics for reader in value.users)
    return [reader for reader in readers if reader.target in _BACKWARDS]
