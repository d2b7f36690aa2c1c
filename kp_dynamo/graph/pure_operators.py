"""Operators whose results follow from their operands, which can be computed while a graph is compiled, and others."""

from __future__ import annotations

import torch

_OF_TORCH = ("aten", "prims", "prim")


def is_pure(target: object) -> bool:
    """Whether an operator gives equal results for equal operands at any time: one of torch's own that is not random.

    A user-defined operator may read anything, such as a Python variable.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _OF_TORCH:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def is_user_defined(target: object) -> bool:
    """Whether an operator is neither one of torch's own nor one of this package."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in (*_OF_TORCH, "kp")
