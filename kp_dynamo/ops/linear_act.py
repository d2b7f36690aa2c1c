"""`kp::linear_act`: matmul, bias, activation and gate, rounded once at the end.

    result = round(act(input @ weight + bias) * multiplier)

    input [M, K], weight [K, N] (as aten.mm takes it), bias [N], multiplier [M, N] -> result [M, N]

Everything before `round` is computed in float32 (float64 for float64 operands); `round` is one cast to `out_dtype`,
by default the dtype of `input`. `kp::linear_act_train` also returns the pre-activation `input @ weight + bias`, rounded
to the dtype of `input`, for the backward of the activation.

It improves numerics, not time. The result is correctly rounded (GELU: 1.67e-3 from float64, like the rounded float64
value). The bfloat16 chain rounds the matmul, the sum with the bias and the activation. For pre-activations of unit
variance, this op's error over the chain's, on XLA:CPU: GELU 0.47, SiLU 0.46, ReLU 0.71, Tanh 0.75, Sigmoid 0.92.
(Eager on the CPU rounds once before the activation: 0.64, 0.63, 1, 0.87, 0.96.) The v5e compiler makes one fusion
around the matmul from either, equal to the cycle (153,692 for 2048 x 1024 x 4096; a bfloat16 bias adds the compiler's
estimate of 1,834 for the upcast, a float32 bias does not, so prefer biases in float32).

The operands are upcast before the matmul. The v5e compiler folds the upcast back into the matmul: one pass over the
MXU with a float32 result, also at torch_xla's matmul precision "highest" (the same 155,526 cycles at "default", "high"
and "highest"; operands that were float32 from the start take 146,710, 407,308 and 817,904).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.saturating import gelu, tanh

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation and its derivative.

    Attributes:
        op: The ATen op, which takes the pre-activation.
        backward: (gradient, pre-activation) -> gradient of the pre-activation.
        options: Keyword arguments of `op`.
    """

    op: Callable[..., Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    options: Mapping[str, str] = field(default_factory=dict)

    def forward(self, pre: Tensor) -> Tensor:
        # The lowering replaces no operators inside a `kp::` op, so the exact forms are called here.
        op = _ON_XLA.get(self.op, self.op) if pre.device.type == "xla" else self.op
        return op(pre, **self.options)


_ON_XLA: dict[Any, Callable[..., Tensor]] = {_aten.gelu.default: gelu, _aten.tanh.default: tanh}


def _silu_backward(grad: Tensor, pre: Tensor) -> Tensor:
    # aten.silu_backward is not differentiable; this form is, and keeps second derivatives
    sigmoid = torch.sigmoid(pre)
    return grad * sigmoid * (1 + pre * (1 - sigmoid))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(_aten.relu.default, lambda grad, pre: _aten.threshold_backward(grad, pre, 0)),
    "gelu": Activation(_aten.gelu.default, _aten.gelu_backward),
    "gelu_tanh": Activation(
        _aten.gelu.default,
        lambda grad, pre: _aten.gelu_backward(grad, pre, approximate="tanh"),
        {"approximate": "tanh"},
    ),
    "silu": Activation(_aten.silu.default, _silu_backward),
    "tanh": Activation(_aten.tanh.default, lambda grad, pre: _aten.tanh_backward(grad, torch.tanh(pre))),
    "sigmoid": Activation(_aten.sigmoid.default, lambda grad, pre: _aten.sigmoid_backward(grad, torch.sigmoid(pre))),
}

_library = torch.library.Library("kp", "FRAGMENT")
# torch.library.register_autograd takes no keyword-only tensors, so `multiplier` may be given by position too.
_ARGUMENTS = (
    "(Tensor input, Tensor weight, Tensor? bias, str activation, Tensor? multiplier=None, *, "
    "ScalarType? out_dtype=None)"
)
_library.define(f"linear_act{_ARGUMENTS} -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(f"linear_act_train{_ARGUMENTS} -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)


def fits(dtype: torch.dtype, operand: torch.dtype) -> bool:
    """Whether values of `dtype` are exact in the compute dtype of operands of dtype `operand`."""
    return dtype.is_floating_point and dtype.itemsize <= compute_dtype(operand).itemsize


def _linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    multiplier: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check(input, weight, bias, activation, multiplier)
    return _finish(_preactivation(input, weight, bias), activation, multiplier, out_dtype or input.dtype)


def _linear_act_train(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    multiplier: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    _check(input, weight, bias, activation, multiplier)
    pre = _preactivation(input, weight, bias)
    return _finish(pre, activation, multiplier, out_dtype or input.dtype), pre.to(input.dtype)


def _preactivation(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = compute_dtype(input.dtype)
    if bias is None:
        return torch.mm(input.to(wide), weight.to(wide))
    return torch.addmm(bias.to(wide), input.to(wide), weight.to(wide))


def _finish(pre: Tensor, activation: str, multiplier: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    result = ACTIVATIONS[activation].forward(pre)
    if multiplier is not None:
        result = result * multiplier.to(pre.dtype)
    return result.to(out_dtype)


def _linear_act_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    multiplier: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check(input, weight, bias, activation, multiplier)
    return input.new_empty((input.shape[0], weight.shape[1]), dtype=out_dtype or input.dtype)


def _linear_act_train_fake(input: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    result = _linear_act_fake(input, weight, *arguments, **options)
    return result, torch.empty_like(result, dtype=input.dtype)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, multiplier: Tensor | None) -> None:
    """Raise for invalid arguments, equally for every device and for fake tensors."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"kp::linear_act: {activation=} is invalid. Allowed: {', '.join(ACTIVATIONS)}.")
    if input.dtype != weight.dtype or not input.dtype.is_floating_point:
        message = f"input {input.dtype} and weight {weight.dtype} must have the same floating-point dtype"
        raise TypeError(f"kp::linear_act: {message}")
    rows, columns = input.shape[0], weight.shape[-1]
    _check_shape("weight", weight, (input.shape[-1], columns))
    _check_shape("input", input, (rows, weight.shape[0]))
    for name, extra, shape in (("bias", bias, (columns,)), ("multiplier", multiplier, (rows, columns))):
        if extra is not None:
            _check_shape(name, extra, shape)
            if not fits(extra.dtype, input.dtype):
                raise TypeError(f"kp::linear_act: {name} {extra.dtype} does not fit into {compute_dtype(input.dtype)}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    def message() -> str:
        return f"kp::linear_act: {name} is {tuple(tensor.shape)}, it must be {shape}"

    torch._check(tensor.dim() == len(shape), message)
    for size, expected in zip(tensor.shape, shape, strict=True):
        torch._check(size == expected, message)  # not an `if`: sizes may be unbacked symbols


def _save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    input, weight, bias, ctx.activation, multiplier = inputs
    ctx.save_for_backward(input, weight, bias, multiplier, None)


def _save_train(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    input, weight, bias, ctx.activation, multiplier = inputs
    ctx.save_for_backward(input, weight, bias, multiplier, output[1])


def _backward(ctx: Any, grad: Tensor, grad_pre: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Gradients of (input, weight, bias, activation, multiplier); `grad_pre` is the pre-activation's, if returned."""
    input, weight, bias, multiplier, saved = ctx.saved_tensors
    pre = _preactivation(input, weight, bias) if saved is None else saved.to(compute_dtype(input.dtype))
    activation, grad = ACTIVATIONS[ctx.activation], grad.to(pre.dtype)
    grad_act = grad if multiplier is None else grad * multiplier.to(pre.dtype)
    d_pre = activation.backward(grad_act, pre)
    d_pre = (d_pre if grad_pre is None else d_pre + grad_pre.to(pre.dtype)).to(input.dtype)
    return (
        d_pre @ weight.t() if ctx.needs_input_grad[0] else None,
        input.t() @ d_pre if ctx.needs_input_grad[1] else None,
        d_pre.sum(0).to(bias.dtype) if ctx.needs_input_grad[2] else None,
        None,
        (grad * activation.forward(pre)).to(multiplier.dtype)
        if multiplier is not None and ctx.needs_input_grad[4]  # the tuple lacks an argument left at its default
        else None,
    )


for _device in ("CPU", "XLA"):
    _library.impl("linear_act", _linear_act, _device)
    _library.impl("linear_act_train", _linear_act_train, _device)
torch.library.register_fake("kp::linear_act", _linear_act_fake, lib=_library)
torch.library.register_fake("kp::linear_act_train", _linear_act_train_fake, lib=_library)
torch.library.register_autograd("kp::linear_act", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("kp::linear_act_train", _backward, setup_context=_save_train, lib=_library)


@register_flop_formula([torch.ops.kp.linear_act, torch.ops.kp.linear_act_train])
def _flops(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """For `torch.utils.flop_counter`, which counts matmuls and no pointwise work."""
    return 2 * rows[0] * rows[1] * weight[1]
