"""Operators whose results follow from their operands: they can be computed while a graph is compiled."""

from __future__ import annotations

import torch


def is_pure(target: object) -> bool:
    """Whether an operator gives equal results for equal operands at any time: one of torch's own that is not random.

    A user-defined operator may read anything, such as a Python variable.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims", "prim"):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags
