"""Complex numbers, of which torch_xla 2.9 lowers some operators as of real ones: no conjugate, another branch."""

from __future__ import annotations

import math
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


def _acos(z: torch.Tensor) -> Any:
    """pi/2 - asin(z): torch_xla's own is off by 3% at 1000."""
    if not z.is_complex():
        return aten.acos.default(z)
    of_sine = torch.view_as_real(z.asin())
    return _complex(math.pi / 2 - of_sine[..., 0], -of_sine[..., 1])


def _acosh(z: torch.Tensor) -> Any:
    """i acos(z) or -i acos(z), whose real part is not negative and whose angle has the sign of z's imaginary part."""
    if not z.is_complex():
        return aten.acosh.default(z)
    of_sine, imaginary = torch.view_as_real(z.asin()), torch.view_as_real(z)[..., 1]
    angle = math.pi / 2 - of_sine[..., 0]
    return _complex(of_sine[..., 1].abs(), torch.where(imaginary < 0, -angle, angle))


def _complex(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


COMPLEX_FORMS: dict[Any, Callable[..., Any]] = {
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.acos.default: _acos,
    aten.acosh.default: _acosh,
}
