"""Whether the call of a child module changes Python objects or its arguments: then no node can stand for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.blocks.call_results import versions_of
from kp_dynamo.compat.dynamo_trace import PythonState, changes_objects
from kp_dynamo.exceptions import XLACompilationError


class ChildrenDiffer(XLACompilationError):
    """Children that were taken to be equal return something else, or change other things."""


class Before:
    """What a call might change, as it was when the trace began to follow it: Python objects, and its arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._objects, self._versions = PythonState(), versions_of(args, kwargs)
        self._given = pytree.tree_flatten((args, kwargs))

    def has_changed(self, args: Any, kwargs: Any) -> bool:
        """Whether the call, which has these arguments afterwards, changed anything."""
        (before, form), (now, form_now) = self._given, pytree.tree_flatten((args, kwargs))
        if form != form_now or not all(map(_is_same, before, now)) or self._versions != versions_of(args, kwargs):
            return True
        return self._objects.has_changed()


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def require_no_changes(name: str) -> None:
    """Check the trace of a child that is compiled by itself: the model was traced as if no child changed objects.

    Raises:
        ChildrenDiffer: It changes Python objects.
    """
    if changes_objects():
        raise ChildrenDiffer(
            f"a call of one of {name} changes Python objects, and the call that torch.compile followed did not. "
            "Allowed: equal modules, of which none changes its attributes, a list or a dict, or all do. Try: "
            "torch.compile(model, backend='kp_tpu') without compile_blocks."
        )
