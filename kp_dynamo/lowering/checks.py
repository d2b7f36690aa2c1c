"""Reject graphs that no lowering supports, before anything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.source_lines import user_line
from kp_dynamo.lowering.base import LoweringSpec
from kp_dynamo.ops.at_true_sizes import name_of

aten = torch.ops.aten


def check_layouts(gm: fx.GraphModule) -> None:
    """Raise if a tensor of the graph is not dense, or has a dtype that torch_xla does not support."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise XLACompilationError(
                f"{node.target} returns a {value.layout} tensor{user_line(node)}, which XLA does not support. Allowed: "
                "torch.strided. Try: keep sparse tensors out of the compiled region with torch.compiler.disable."
            )
        if isinstance(value, torch.Tensor) and value.dtype in _NO_DTYPES:
            raise XLACompilationError(
                f"{node.target} returns a {value.dtype} tensor{user_line(node)}, which torch_xla does not support. "
                "Allowed: bool, integers, float16, bfloat16, float32, float64, complex64, complex128. Try: cast before."
            )


def check_operands(gm: fx.GraphModule) -> None:
    """Raise where torch refuses the operands only in its kernels, which fake tensors do not call."""
    for node in gm.graph.nodes:
        for operators, refuses, message in _REFUSED_BY_KERNELS:
            if node.target in operators and refuses(*node.args[:2]):
                raise XLACompilationError(f"{node.target}{user_line(node)}: torch refuses {message}.")


def _dtype(operand: Any) -> torch.dtype | None:
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else operand
    if isinstance(value, torch.Tensor):
        return value.dtype
    return torch.bool if isinstance(value, (bool, torch.SymBool)) else None


def _any_bool(*operands: Any) -> bool:
    return torch.bool in map(_dtype, operands)


def _any_complex(*operands: Any) -> bool:
    return any(dtype is not None and dtype.is_complex for dtype in map(_dtype, operands))


def _negative_power_of_integers(base: Any, exponent: Any) -> bool:
    dtype = _dtype(base)
    integers = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return integers and isinstance(exponent, int) and exponent < 0


_REFUSED_BY_KERNELS = (
    (
        {aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar},
        _any_bool,
        "a subtraction with a bool tensor. Allowed: numbers. Try: ~ to invert a mask, ^ for a difference of masks, or "
        ".to(dtype) before",
    ),
    (
        {getattr(getattr(aten, name), kind) for name in ("lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")},
        _any_complex,
        "to order complex numbers. Allowed: real numbers. Try: compare .abs(), .real or .imag",
    ),
    ({aten.sign.default}, _any_complex, "the sign of complex numbers. Allowed: real numbers. Try: torch.sgn"),
    (
        {aten.pow.Tensor_Scalar},
        _negative_power_of_integers,
        "integers to a negative power. Allowed: powers from 0 on, or floating-point numbers. Try: .float() before",
    ),
)
# Dispatch keys of kernels that run on every device.
_ANYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
# torch_xla 2.9 does not support these.
_NO_DTYPES = (torch.complex32, torch.quint8, torch.qint8, torch.qint32)


def check_runs_somewhere(missing: list[fx.Node], spec: LoweringSpec) -> None:
    """Raise if operators that XLA cannot lower may not, or cannot, run on the CPU."""
    for node in missing:
        name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
        keys = ("CPU", *_ANYWHERE)
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
            raise XLACompilationError(
                f"{node.target} can run neither on XLA nor on the CPU{user_line(node)}. "
                "Try: register a CPU kernel, or keep it out of the compiled region with torch.compiler.disable."
            )
    if spec.strict and missing:
        listed = "; ".join(f"{name_of(n)}{user_line(n)}" for n in missing)
        raise XLACompilationError(
            f"strict=True and XLA has no lowering for: {listed}. "
            "Try: rewrite these lines with supported operators, or allow CPU fallbacks with strict=False."
        )


def check_donation(kept: Sequence[tuple[int, str]], args: Sequence[Any], spec: LoweringSpec) -> None:
    """Raise under `strict` if an overwritten argument cannot be donated."""
    if spec.strict and kept:
        listed = "; ".join(f"{args[i].dtype} {list(args[i].shape)}, because {reason}" for i, reason in kept)
        raise XLACompilationError(
            f"strict=True and donate='mutated', but tensors that the {spec.name} graph overwrites keep their buffers: "
            f"{listed}. Try: change these lines, or allow it with strict=False."
        )
