"""Torch's own operator samples (`op_db`): what an operator is called with and what eager answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

SAMPLES_PER_OP = 2

# op_db wraps random operators in a function that seeds first, which breaks Dynamo's graph before it begins.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


@dataclass(frozen=True)
class Call:
    """One call of an operator, with arguments of its own, which the operator may overwrite."""

    op: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call with every tensor changed."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, change, (self.args, self.kwargs))
        return Call(self.op, args, kwargs)

    def copy(self) -> Call:
        """The same call with copies of its tensors."""
        return self.mapped(torch.clone)

    def in_float64(self) -> Call:
        """The same call in float64, dtype arguments included."""
        wider = self.mapped(lambda t: t.double() if t.dtype is torch.float32 else t)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in wider.kwargs.items()}
        return Call(self.op, wider.args, kwargs)

    def target(self) -> Callable[..., Any]:
        """The operator as a plain function, fit for torch.compile."""
        op = self.op.op
        return lambda *args, **kwargs: op(*args, **kwargs)

    def run(self, through: Callable[..., Any] | None = None) -> tuple[Any, list[torch.Tensor]]:
        """The result, and the tensors among the arguments after the call: an operator may write into them."""
        with torch.no_grad():
            result = (through or self.op.op)(*self.args, **self.kwargs)
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return result, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@cache
def ops() -> dict[str, OpInfo]:
    """Every operator of `op_db` that takes float32 or int32 on the CPU, by its full name; jiterators exist for CUDA."""
    fitting = [op for op in common_methods_invocations.op_db if _dtype_of(op) is not None]
    return {op.full_name: op for op in fitting if "jiterator" not in op.name}


def calls(name: str, dtype: torch.dtype | None = None) -> list[Call]:
    """The first samples of an operator: equal ones, in fresh tensors, at each call.

    Args:
        name: The operator's full name.
        dtype: Of its samples; by default float32, or int32 for an operator of integers alone.
    """
    op = ops()[name]
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    samples = itertools.islice(op.sample_inputs("cpu", dtype or _dtype_of(op), requires_grad=False), SAMPLES_PER_OP)
    return [Call(op, (sample.input, *sample.args), dict(sample.kwargs)) for sample in samples]


def _dtype_of(op: OpInfo) -> torch.dtype | None:
    return next((dtype for dtype in (torch.float32, torch.int32) if op.supports_dtype(dtype, "cpu")), None)
