"""XLA operators that torch_xla 2.9 lowers no ATen operator to, or not with all attributes, as custom computations.

XLA inlines them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.hlo_module import Shape, fft_module


def reduce_max(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The maximum along `dims`, with an initial value of -inf: torch_xla's own uses the lowest finite number."""
    return _registered("kp_reduce_max", _max)(x, dims=dims)  # type: ignore[no-any-return]


def reduce_min(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The minimum along `dims`, with an initial value of inf."""
    return _registered("kp_reduce_min", _min)(x, dims=dims)  # type: ignore[no-any-return]


def window_sums(x: torch.Tensor, sizes: list[int], strides: list[int]) -> torch.Tensor:
    """The sums over windows of the last dimensions, without padding."""
    return _registered("kp_window_sums", _window_sums)(x, sizes=sizes, strides=strides)  # type: ignore[no-any-return]


def halved(x: torch.Tensor) -> torch.Tensor:
    """Half of an integer that is at least 0, rounded down: torch_xla divides integers as float32."""
    return _registered("kp_halved", _halved)(x)  # type: ignore[no-any-return]


def _halved(x: Any) -> Any:
    from torch_xla.core import xla_builder as xb

    return x / xb.Op.scalar(x.builder(), 2, x.shape().dtype)


def fft(x: torch.Tensor, kind: str, length: int) -> torch.Tensor:
    """The discrete Fourier transform of the last dimension; the inverse kinds divide by its length.

    Args:
        x: Complex, or real for "RFFT".
        kind: "FFT", "IFFT", "RFFT" (the first `length // 2 + 1` frequencies) or "IRFFT" (the inverse of that).
        length: The number of samples.
    """
    return _registered("kp_fft", _fft)(x, kind=kind, length=length)  # type: ignore[no-any-return]


def convolution(
    x: torch.Tensor,
    kernel: torch.Tensor,
    *,
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    x_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    groups: int,
    precision: str,
) -> torch.Tensor:
    """XLA's convolution of x [N, C, ...] with a kernel [O, C / groups, ...].

    Args:
        x: The input.
        kernel: The kernel.
        strides: Step of the window, for each spatial dimension.
        padding: What is added before and after each spatial dimension of the dilated x; negative numbers cut off.
        x_dilation: Distance of neighbours in x, with zeros in between.
        kernel_dilation: The same in the kernel.
        groups: Number of groups of channels.
        precision: "default", "high" or "highest".
    """
    window = {"strides": strides, "padding": padding, "x_dilation": x_dilation, "kernel_dilation": kernel_dilation}
    return _registered("kp_convolution", _convolution)(  # type: ignore[no-any-return]
        x, kernel, **window, groups=groups, precision=precision
    )


@functools.cache
def _registered(name: str, lowering: Callable[..., Any]) -> Callable[..., Any]:
    # torch_xla 2.9; it caches one computation per shape.
    from torch_xla.core.xla_op_registry import register

    return register(name, lowering)  # type: ignore[no-any-return]


def _max(x: Any, *, dims: list[int]) -> Any:
    return _reduced(x, dims, lambda a, b: a.max(b), float("-inf"))


def _min(x: Any, *, dims: list[int]) -> Any:
    return _reduced(x, dims, lambda a, b: a.min(b), float("inf"))


def _reduced(x: Any, dims: list[int], combine: Callable[..., Any], start: float) -> Any:
    from torch_xla.core import xla_builder as xb

    kind = x.shape().dtype
    number = xb.Shape.create(kind, ())
    computation = xb.create_computation("combine", combine, (number, number))
    return x.reduce(xb.Op.scalar(x.builder(), start, kind), computation, dims)


def _window_sums(x: Any, *, sizes: list[int], strides: list[int]) -> Any:
    from torch_xla.core import xla_builder as xb

    kind, whole = x.shape().dtype, [1] * (x.shape().rank - len(sizes))
    number = xb.Shape.create(kind, ())
    computation = xb.create_computation("add", lambda a, b: a + b, (number, number))
    return x.reduce_window(xb.Op.scalar(x.builder(), 0.0, kind), computation, whole + sizes, whole + strides)


def cast(x: torch.Tensor, xla_type: str) -> torch.Tensor:
    """A cast in XLA, regardless of the dtype that torch_xla reports for `x`."""
    return _registered("kp_cast", _cast)(x, xla_type=xla_type)  # type: ignore[no-any-return]


def _cast(x: Any, *, xla_type: str) -> Any:
    return x.cast(xla_type)


def has_sign(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit is set: for numbers below 0, -0 and NaNs with a sign."""
    return _registered("kp_has_sign", _has_sign)(x)  # type: ignore[no-any-return]


def _has_sign(x: Any) -> Any:
    from torch_xla.core import xla_builder as xb

    kind = x.shape().dtype
    number = x.bitcast({"16": "s16", "32": "s32", "64": "s64"}[kind[-2:]])
    return number < xb.Op.scalar(x.builder(), 0, number.shape().dtype)


def _fft(x: Any, *, kind: str, length: int) -> Any:
    from torch_xla.core import xla_builder as xb

    operand = Shape(x.shape().dtype, tuple(x.shape().sizes))
    real, complex_ = {"f32": ("f32", "c64"), "c64": ("f32", "c64")}.get(operand.xla_type, ("f64", "c128"))
    last = length // 2 + 1 if kind == "RFFT" else length
    result = Shape(real if kind == "IRFFT" else complex_, (*operand.sizes[:-1], last))
    return xb.Op.call(xb.computation_from_module_proto("fft", fft_module(kind, length, operand, result)), [x])


def _convolution(
    x: Any,
    kernel: Any,
    *,
    strides: Any,
    padding: Any,
    x_dilation: Any,
    kernel_dilation: Any,
    groups: int,
    precision: str,
) -> Any:
    spatial = tuple(range(2, x.shape().rank))
    return x.conv_general_dilated(
        kernel, strides, padding, x_dilation, kernel_dilation,
        input_batch_dimension=0, input_feature_dimension=1, input_spatial_dimensions=spatial,
        kernel_output_feature_dimension=0, kernel_input_feature_dimension=1, kernel_spatial_dimensions=spatial,
        output_batch_dimension=0, output_feature_dimension=1, output_spatial_dimensions=spatial,
        feature_group_count=groups, precision_config=precision,
    )  # fmt: skip
