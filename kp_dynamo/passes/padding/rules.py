"""The registry of rules, and the rule of operators that act on each element alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.passes.padding.atoms import Padded, Symbolic, broadcast
from kp_dynamo.passes.padding.call import Call, Like, is_padded_value
from kp_dynamo.passes.padding.operands import Layouts, require_no_length_as_number, with_layouts

aten, kp = torch.ops.aten, torch.ops.kp


Function = Callable[[Call], Any]


@dataclass(frozen=True)
class Rule:
    """What makes the calls of an operator right, and which operands it takes.

    Attributes:
        layouts: See `operands.py`; a function of the call where they depend on its arguments.
        lengths: Names of the arguments that are no sizes, and in which it computes with the true length.
    """

    function: Function
    layouts: Layouts | Callable[[Call], Layouts]
    lengths: frozenset[str]

    def __call__(self, call: Call) -> Any:
        require_no_length_as_number(call, self.lengths)
        return self.function(with_layouts(call, self.layouts(call) if callable(self.layouts) else self.layouts))


RULES: dict[Any, Rule] = {}


def rule(
    *targets: Any, layouts: Layouts | Callable[[Call], Layouts] = None, lengths: str = ""
) -> Callable[[Function], Function]:
    """Register the rule of some operators: Call -> `Padded`, or a tuple of them.

    A rule raises `Refused` where the call cannot be made right, and returns NotImplemented where it is to be taken
    apart. Its operands have the layouts that it declares, and canonical ones where it declares none. A length in an
    argument that is no size is refused, but in those that `lengths` names, with blanks between.
    """

    def register(function: Function) -> Function:
        for target in targets:
            assert target not in RULES, target
            RULES[target] = Rule(function, layouts, frozenset(lengths.split()))
        return function

    return register


# Act on each element alone, and torch 2.9 does not tag them so, or they have parameters of their own.
_ELEMENTWISE = {
    aten.alias.default, aten.bernoulli.default, aten.bernoulli.p, aten.clone.default, aten.detach.default,
    aten.empty_like.default, aten.lift_fresh_copy.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.native_dropout_backward.default, aten.ones_like.default, aten.rand_like.default,
    aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype, aten.where.ScalarOther,
    aten.where.ScalarSelf, aten.where.self, aten.zeros_like.default, aten._to_copy.default, aten.fill.Scalar,
    aten.fill.Tensor, aten.copy.default, aten.normal.Tensor_float, aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor, aten.complex.default, aten.polar.default, aten._conj.default, kp.shard_batch.default,
}  # fmt: skip


_NARROW = (torch.bfloat16, torch.float16)


def is_elementwise(target: Any) -> bool:
    """Whether an operator acts on each element alone, with broadcasting."""
    return target in _ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def elementwise(call: Call) -> Any:
    """Tails stay tails. A length among the arguments is a value, and means the true one."""
    call = with_layouts(call, "...")
    dims = broadcast([x.dims for x in call.operands()])
    has_length = any(
        isinstance(x, Symbolic) for x in pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_padded_value)
    )
    result = _with_true_lengths(call) if has_length else call.unchanged()
    return pytree.tree_map_only(torch.Tensor, lambda tensor: Padded(tensor, dims), result)


def _with_true_lengths(call: Call) -> Any:
    dtypes = [x.tensor.dtype for x in call.operands()]
    # A length above 256 is no bfloat16 number; eager computes in float32 with it.
    widens = isinstance(call.like, Like) and call.like.dtype in _NARROW

    def value(x: Any) -> Any:
        if isinstance(x, Padded):
            return x.tensor.float() if widens and x.tensor.dtype in _NARROW else x.tensor
        true = call.masks.true_value(x)
        return true.to(dtype_beside(true.dtype, dtypes)) if isinstance(true, torch.Tensor) else true

    args, kwargs = pytree.tree_map(value, (call.args, call.kwargs), is_leaf=is_padded_value)
    # A tensor where a number was: the packet finds the overload that takes it.
    result = call.target.overloadpacket(*args, **kwargs)
    return result.to(call.like.dtype) if isinstance(call.like, Like) else result


def dtype_beside(number: torch.dtype, tensors: Sequence[torch.dtype]) -> torch.dtype:
    """In which dtype a number enters: as torch promotes it, said aloud because torch_xla does not always."""
    if number == torch.bool:
        return number
    floating = [torch.float32 if dtype in _NARROW else dtype for dtype in tensors if dtype.is_floating_point]
    if floating:
        return functools.reduce(torch.promote_types, floating)
    if number.is_floating_point:
        return torch.get_default_dtype()
    integers = [dtype for dtype in tensors if dtype != torch.bool and not dtype.is_complex]
    return functools.reduce(torch.promote_types, integers, *([] if integers else [number]))
