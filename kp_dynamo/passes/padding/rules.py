"""The registry of rules, and the rule of elementwise operators."""

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
    """How to make the calls of an operator correct, and the operands it takes.

    Attributes:
        function: Makes a call correct; see `rule`.
        layouts: See `operands.py`; a function of the call if they depend on its arguments.
        lengths: Names of the arguments that are not sizes, for which the rule uses the true length.
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

    A rule raises `Refused` if it cannot make the call correct, and returns NotImplemented to have it decomposed. Its
    operands have the declared layouts, and are canonical without a declaration. A length in an argument that is not a
    size is refused, except in those that `lengths` names, separated by blanks.
    """

    def register(function: Function) -> Function:
        for target in targets:
            assert target not in RULES, target
            RULES[target] = Rule(function, layouts, frozenset(lengths.split()))
        return function

    return register


# Elementwise operators that torch 2.9 does not tag as pointwise, or that have further parameters.
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
    """Whether an operator is elementwise, with broadcasting."""
    return target in _ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def elementwise(call: Call) -> Any:
    """Tails stay tails. A length among the arguments is a value, and is replaced by the true length."""
    call = with_layouts(call, "...")
    dims = broadcast([x.dims for x in call.operands()])
    has_length = any(
        isinstance(x, Symbolic) for x in pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_padded_value)
    )
    result = _with_true_lengths(call) if has_length else call.unchanged()
    return pytree.tree_map_only(torch.Tensor, lambda tensor: Padded(tensor, dims), result)


def _with_true_lengths(call: Call) -> Any:
    dtypes = [x.tensor.dtype for x in call.operands()]
    # bfloat16 cannot represent every length above 256; eager computes in float32.
    widens = isinstance(call.like, Like) and call.like.dtype in _NARROW

    def value(x: Any) -> Any:
        if isinstance(x, Padded):
            return x.tensor.float() if widens and x.tensor.dtype in _NARROW else x.tensor
        true = call.masks.true_value(x)
        return true.to(promoted_dtype(true.dtype, dtypes)) if isinstance(true, torch.Tensor) else true

    args, kwargs = pytree.tree_map(value, (call.args, call.kwargs), is_leaf=is_padded_value)
    # A tensor replaces a number: the packet picks the matching overload.
    result = call.target.overloadpacket(*args, **kwargs)
    return result.to(call.like.dtype) if isinstance(call.like, Like) else result


def promoted_dtype(number: torch.dtype, tensors: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that torch promotes a number to, made explicit because torch_xla does not always do it."""
    if number == torch.bool:
        return number
    floating = [torch.float32 if dtype in _NARROW else dtype for dtype in tensors if dtype.is_floating_point]
    if floating:
        return functools.reduce(torch.promote_types, floating)
    if number.is_floating_point:
        return torch.get_default_dtype()
    integers = [dtype for dtype in tensors if dtype != torch.bool and not dtype.is_complex]
    return functools.reduce(torch.promote_types, integers, *([] if integers else [number]))
