"""Relative errors of what a graph returns, as docs/correctness.md defines them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.passes.base import Errors


@dataclass(frozen=True)
class Outputs:
    """What a graph returned.

    Attributes:
        results: The results and the new values of inputs that are written in place.
        gradients: The gradient of each input, or None; empty in inference.
    """

    results: Sequence[Any]
    gradients: Sequence[Any] = ()

    def errors(self, reference: Outputs) -> Errors:
        """The relative errors of both groups against a reference; None for a group without floating-point numbers."""
        return Errors(
            relative_error(self.results, reference.results), relative_error(self.gradients, reference.gradients)
        )

    def counts(self) -> tuple[int, int]:
        """How many floating-point numbers are in the results, and in the gradients."""
        return num_floating(self.results), num_floating(self.gradients)


def relative_error(values: Sequence[Any], reference: Sequence[Any]) -> float | None:
    """|values - reference| / |reference|, over all floating-point numbers together; None if there are none.

    Numbers that are infinite or NaN in the reference must be the same, and do not count. If the reference is zero, the
    error is the norm of the difference. It is infinite if shapes differ, or if a number is not finite where that of the
    reference is.
    """
    pairs = [(a, b) for a, b in zip(values, reference, strict=True) if is_floating(a) or is_floating(b)]
    if not pairs:
        return None
    difference = norm = 0.0
    for a, b in pairs:
        if not (is_floating(a) and is_floating(b)) or a.shape != b.shape:
            return math.inf
        added, of_reference = _squares(a, b)
        difference, norm = difference + added, norm + of_reference
    if not math.isfinite(difference):
        return math.inf
    return math.sqrt(difference / norm if norm > 0 else difference)


def num_floating(values: Sequence[Any]) -> int:
    """How many floating-point numbers there are."""
    return sum(value.numel() for value in values if is_floating(value))


def is_floating(value: Any) -> bool:
    """Whether a value is a tensor of real or complex floating-point numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _squares(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The squared norms of the difference and of the reference."""
    a, b = _flat(a), _flat(b)
    finite = b.isfinite()
    if not bool(finite.all()):
        others, wanted = a[~finite], b[~finite]
        if not torch.allclose(others, wanted, rtol=0, atol=0, equal_nan=True):
            return math.inf, 0.0
        a, b = a[finite], b[finite]
    return float((a - b).square().sum()), float(b.square().sum())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double().flatten()
