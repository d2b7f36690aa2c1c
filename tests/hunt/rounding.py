"""What rounding does to a program, measured: the program run eagerly while operands and results move a little.

A float32 operator rounds what it takes and what it gives by a share of at most 2**-24, a bfloat16 matmul by 2**-8. A
run in which all of these move by random shares within these bounds ends as far from the exact result as rounding may
take it, whatever the conditioning: cancellation, a large mean and a tiny variance, a near tie. Several such runs, and
a factor over the largest (`compare.py`), make a bound for tensors that are too small for an average over their
elements.

Operators that jump (comparisons, `floor`) get their operands as they are: what is exact in eager must be so here.
Those that choose among equal values get ties broken, as torch does not say which is chosen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = {torch.float64: 2.0**-24, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_BFLOAT16 = UNIT[torch.bfloat16]
_aten = torch.ops.aten
_NAMES = """
mm addmm bmm baddbmm addbmm mv addmv dot vdot linear linear_backward convolution convolution_backward addr ger
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_attention_math _trilinear _addmm_activation _thnn_fused_gru_cell mkldnn_rnn_layer
_cdist_forward _cdist_backward
"""
MATMULS = frozenset(packet for name in _NAMES.split() if (packet := getattr(_aten, name, None)) is not None)


_JUMPS = """
eq ne lt le gt ge equal isin bucketize searchsorted floor ceil trunc round frac remainder fmod floor_divide _to_copy
sign heaviside isnan isinf isfinite isposinf isneginf logical_not logical_and logical_or logical_xor nonzero where
masked_fill sgn signbit clone any all count_nonzero index index_put copy cat stack gather scatter nan_to_num
nextafter frexp
"""
JUMPS = frozenset(packet for name in _JUMPS.split() if (packet := getattr(_aten, name, None)) is not None)
# Constants are what they are in every dtype.
_CONSTANTS = "ones_like full_like new_ones new_full scalar_tensor fill_ ones full arange eye tril_indices"
CONSTANTS = frozenset(packet for name in _CONSTANTS.split() if (packet := getattr(_aten, name, None)) is not None)
_CHOICES = (
    "sort topk argsort argmax argmin max min median nanmedian kthvalue mode cummax cummin max_pool2d_with_indices"
)
CHOICES = frozenset(packet for name in _CHOICES.split() if (packet := getattr(_aten, name, None)) is not None)
_TIE = 2.0**-22


def _norm_inside(args: Any, results: Any) -> torch.Tensor:
    if results[2].numel() == 0:  # BatchNorm in evaluation divides by the root of its running variance
        return args[0].abs().max() * (args[4] + args[7]).rsqrt().max()
    return args[0].abs().max() * results[2].abs().max()


def _norm_backward_inside(rstd: int) -> Callable[[Any, Any], torch.Tensor]:
    """Of a backward whose argument at this position is one over the deviation."""

    def size(args: Any, _: Any) -> torch.Tensor:
        if args[rstd] is None or args[rstd].numel() == 0:  # BatchNorm in evaluation, which only multiplies
            return args[0].new_zeros(())
        return args[0].abs().max() * args[rstd].abs().max()

    return size


# What operators round inside, where digits cancel: the size of that in the result, from arguments and results. GELU
# adds 1 to `erf`, which is near -1. Norms subtract the mean from `x`, which XLA may fuse with the product that `x` is.
# Their backwards subtract two sums over the gradient, which cancel: where one element of a row stands out, all but
# `eps / variance` of the gradient does.
_INSIDE: dict[Any, Callable[[Any, Any], torch.Tensor]] = {
    _aten.gelu: lambda args, result: args[0].abs() / 2,
    **dict.fromkeys((_aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm), _norm_inside),
    _aten.native_layer_norm_backward: _norm_backward_inside(4),
    _aten.native_group_norm_backward: _norm_backward_inside(3),
    _aten.native_batch_norm_backward: _norm_backward_inside(6),
}
# Norms whose mean may be that of one element, by their arguments. The element less its mean is exactly 0, and the
# result the bias: in every other run. ATen multiplies `x` and the mean before it subtracts them, and may round.
_OF_ONE: dict[Any, Callable[[Any], bool]] = {
    _aten.native_layer_norm: lambda args: math.prod(args[1]) == 1,
    _aten.native_group_norm: lambda args: args[4] // args[6] * args[5] == 1,
}
# Take `x`, which may have been stored in bfloat16 for them, and its mean and deviation, which may be those of `x`
# before that: XLA keeps excess precision where it fuses.
_OF_STORED = frozenset(
    (_aten.native_layer_norm_backward, _aten.native_group_norm_backward, _aten.native_batch_norm_backward)
)
# Running mean and variance, which native_batch_norm writes to, though its schema does not say so.
_WRITTEN = {_aten.native_batch_norm: slice(3, 5)}


def _bias(bias: torch.Tensor | None, result: torch.Tensor, norm: Any) -> Any:
    """What a norm adds, to be broadcast: to channels or to the last dimensions."""
    if bias is None:
        return torch.zeros((), dtype=result.dtype)
    return bias.reshape(-1, *[1] * (result.dim() - 2)) if norm is _aten.native_group_norm else bias


def _in_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a composite operator, made of its parts: in inference mode, it comes here as a whole."""
    if not torch.is_inference_mode_enabled():
        return NotImplemented
    with mode:
        return func.decompose(*args, **kwargs)


class Jitter(TorchDispatchMode):
    """Within, results of operators move by random shares.

    Args:
        rounding: What is rounded to bfloat16: "nothing"; "matmul": operands and results of matmuls; "all": every
            result as well, once there has been a matmul.
        seed: Of the random shares.
    """

    def __init__(self, rounding: str, seed: int) -> None:
        super().__init__()
        self._rounding, self._had_matmul = rounding, False
        # What is stored in bfloat16 may equal a number that it was near. It may also stay in float32: every other run.
        self._has_grid = seed % 2 == 0
        self._generator = torch.Generator().manual_seed(seed)
        self._fast: list[bool] = []  # the mode is entered again inside itself

    def __enter__(self) -> Any:
        # One operator for a whole encoder layer in inference: what is rounded inside does not come here.
        self._fast.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fast.pop())
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (parts := _in_parts(self, func, args, kwargs)) is not NotImplemented:
            return parts
        is_matmul = func.overloadpacket in MATMULS
        rounds = is_matmul and self._rounding != "nothing"
        self._had_matmul |= rounds
        if func.overloadpacket in CONSTANTS:
            return func(*args, **kwargs)
        args, kwargs = self._operands(func, list(args), kwargs, rounds=rounds)
        result = self._result(func, args, kwargs, rounds=rounds)
        if func.is_view or func.overloadpacket in (_aten.detach, _aten.alias, _aten.lift_fresh):
            return result
        unit = _BFLOAT16 if rounds or (self._rounding == "all" and self._had_matmul) else 0.0
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    pytree.tree_map_only(torch.Tensor, lambda t: self._move_in_place(t, unit), value)
            return result
        moved = pytree.tree_map_only(torch.Tensor, lambda t: self._moved(t, unit), result)
        return self._moved_inside(func.overloadpacket, args, moved)

    def _result(self, func: Any, args: Any, kwargs: Any, *, rounds: bool) -> Any:
        """On the grid of bfloat16, a product and the bias that is added to it may cancel to 0."""
        if rounds and self._has_grid and func.overloadpacket is _aten.addmm and not kwargs:
            return args[0] + self._moved(args[1] @ args[2], _BFLOAT16)
        return func(*args, **kwargs)

    def _moved_inside(self, packet: Any, args: Any, results: Any) -> Any:
        first = results[0] if isinstance(results, tuple) else results
        if packet not in _INSIDE or first is None or first.numel() == 0:  # None: no gradient is asked for
            return results
        if self._has_grid and packet in _OF_ONE and _OF_ONE[packet](args):
            first.copy_(_bias(args[2], first, packet))
            return results
        size = _INSIDE[packet](args, results).nan_to_num(0.0, 0.0, 0.0)
        first.add_((size * (self._factor(first, 0.0) - 1)).to(first.dtype))
        return results

    def _operands(self, func: Any, args: list[Any], kwargs: Any, *, rounds: bool) -> Any:
        packet = func.overloadpacket
        if not (func.is_view or func._schema.is_mutable or packet in JUMPS):
            least = _BFLOAT16 if rounds else _TIE if packet in CHOICES else 0.0
            written = _WRITTEN.get(packet, slice(0, 0))
            moved, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: self._moved(t, least, breaks_ties=packet in CHOICES), (args, kwargs)
            )
            args = [*moved[: written.start], *args[written], *moved[written.stop :]]
        if packet in _OF_STORED and self._had_matmul:
            args[1] = self._moved(args[1], _BFLOAT16)
        if packet in (_aten.copysign, _aten.signbit):
            args[-1] = self._signed(args[-1])
        if packet in (_aten.sum, _aten.mean) and args[0].dim():
            args[0] = self._reordered(args[0], args[1] if len(args) > 1 else None)
        return args, kwargs

    def _moved(self, tensor: torch.Tensor, unit: float, *, breaks_ties: bool = False) -> torch.Tensor:
        if tensor.is_complex():
            return self._moved_parts(tensor, unit)
        if tensor.dtype not in UNIT:
            return tensor
        moved = (tensor.double() * self._factor(tensor, unit)).to(tensor.dtype)
        if unit == _BFLOAT16 and self._has_grid:
            moved = moved.to(torch.bfloat16).to(moved.dtype)
        if breaks_ties:  # zeros too
            moved = moved + (2.0**-100 * (self._factor(tensor, 1.0) - 1)).to(moved.dtype)
        # The operator's own memory, so that strides are what they were.
        return torch.empty_like(tensor).copy_(moved) if moved.stride() != tensor.stride() else moved

    def _moved_parts(self, tensor: torch.Tensor, unit: float) -> torch.Tensor:
        """Zeros get either sign, by which a function chooses its side of a branch cut."""
        parts = torch.view_as_real(tensor.resolve_conj().resolve_neg().contiguous())
        signs = self._factor(parts, 1.0).to(parts.dtype) - 1
        moved = torch.where(parts == 0, torch.copysign(parts, signs), self._moved(parts, unit))
        return torch.empty_like(tensor).copy_(torch.view_as_complex(moved))

    def _signed(self, sign: Any) -> Any:
        """Either sign for a NaN, of which IEEE 754 does not say the sign behind an operation."""
        if not isinstance(sign, torch.Tensor) or not sign.is_floating_point():
            return sign
        return torch.where(sign.isnan(), self._factor(sign, 1.0).to(sign.dtype) - 1, sign)

    def _reordered(self, x: torch.Tensor, dims: Any) -> torch.Tensor:
        """Addends in another order, which torch does not name: near the largest number it decides what overflows."""
        for dim in [dims] if isinstance(dims, int) else dims or range(x.dim()):
            x = x.index_select(dim, torch.randperm(x.shape[dim], generator=self._generator))
        return x

    def _move_in_place(self, tensor: torch.Tensor, unit: float) -> None:
        if tensor.dtype in UNIT and not (0 in tensor.stride() and tensor.numel() > 1):
            counted = not tensor.is_inference()  # what inference mode makes counts no versions
            preserved = torch.autograd._unsafe_preserve_version_counter
            with preserved(tensor) if counted else contextlib.nullcontext():
                tensor.mul_(self._factor(tensor, unit))

    def _factor(self, tensor: torch.Tensor, unit: float) -> torch.Tensor:
        """In float64: above 1, the next number of float32 is twice as far as these go."""
        # Not torch.rand, which a program with random operators has replaced.
        share = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-1, 1, generator=self._generator)
        return 1 + max(unit, UNIT[tensor.dtype]) * share


class Recorder(TorchDispatchMode):
    """Within, notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (parts := _in_parts(self, func, args, kwargs or {})) is not NotImplemented:
            return parts
        self.ops.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))
