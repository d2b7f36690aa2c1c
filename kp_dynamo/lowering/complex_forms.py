"""Complex numbers, of which torch_xla 2.9 takes some gradients as of real ones, without the conjugate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _tanh_backward(gradient: torch.Tensor, output: torch.Tensor) -> Any:
    if not output.is_complex():
        return aten.tanh_backward.default(gradient, output)
    return gradient * (1 - output * output).conj_physical()


def _sigmoid_backward(gradient: torch.Tensor, output: torch.Tensor) -> Any:
    if not output.is_complex():
        return aten.sigmoid_backward.default(gradient, output)
    return gradient * (output * (1 - output)).conj_physical()


COMPLEX_FORMS: dict[Any, Callable[..., Any]] = {
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
}
