"""Compares a compiled model with the eager one: the difference of results and gradients, and the time of a call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.api.models import SampleInputs, unchanged
from kp_dynamo.compat import xla
from kp_dynamo.explanation.run_once import gradients_of

Tensors = list[torch.Tensor]


def difference(module: nn.Module, compiled: Callable[..., Any], inputs: SampleInputs) -> tuple[float, float] | None:
    """How far the results of a model, and the gradients of their sum, are from eager; None if two eager runs differ.

    Each is the norm of the difference over the norm of eager's, over all values that are finite in both. It is infinite
    if only one of them has an infinity or NaN somewhere, or if integers or booleans differ, and 0 without gradients.
    Both run on the same values; `module` and torch's random state are restored.
    """
    eager = _run(module, module, inputs)
    if any(map(_relative, _run(module, module, inputs, skip=7), eager)):
        return None
    results, gradients = map(_relative, _run(module, compiled, inputs), eager)
    return results, gradients


def milliseconds(module: nn.Module, run: Callable[..., Any], inputs: SampleInputs) -> float:
    """Median time of 5 synchronized calls of `run`, including the backward if the results have one."""
    taken = []
    with unchanged(module):
        for _ in range(5):
            given = inputs.on_device_of(module)
            xla.synchronize()
            start = time.perf_counter()
            _call(module, run, given)
            xla.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def _run(module: nn.Module, run: Callable[..., Any], inputs: SampleInputs, skip: int = 0) -> tuple[Tensors, Tensors]:
    """Results and gradients, on the CPU, after drawing `skip` random numbers."""
    with unchanged(module):
        torch.rand(skip, device="cpu")
        results, gradients = _call(module, run, inputs.on_device_of(module))
        return [r.detach().cpu() for r in results], [g.detach().cpu() for g in gradients]


def _call(module: nn.Module, run: Callable[..., Any], inputs: SampleInputs) -> tuple[Tensors, Tensors]:
    leaves = pytree.tree_leaves(inputs.call(run))
    results = [t for t in leaves if isinstance(t, torch.Tensor) and not t.is_quantized]
    wanted = [p for p in module.parameters() if p.requires_grad]
    differentiable = [r for r in results if r.requires_grad]
    if not differentiable or not wanted:
        return results, []
    return results, [g for g in gradients_of(differentiable, wanted, module) if g is not None]


def _relative(mine: Tensors, eager: Tensors) -> float:
    """Norm of the difference over the norm, over all tensors, in float64; infinite if shapes or kinds differ."""
    if [(t.shape, _is_exact(t)) for t in mine] != [(t.shape, _is_exact(t)) for t in eager]:
        return math.inf
    if not all(torch.equal(a, b) for a, b in zip(mine, eager, strict=True) if _is_exact(b)):
        return math.inf
    pairs = [(_in_float64(a), _in_float64(b)) for a, b in zip(mine, eager, strict=True) if not _is_exact(b)]
    equal = [(a == b) | (a.isnan() & b.isnan()) for a, b in pairs]
    distance = math.hypot(*(torch.where(e, 0.0, a - b).norm().item() for e, (a, b) in zip(equal, pairs, strict=True)))
    size = math.hypot(*(torch.where(b.isfinite(), b, 0.0).norm().item() for _, b in pairs))
    if not math.isfinite(distance) or not math.isfinite(size):
        return math.inf
    return distance / (size or 1)


def _is_exact(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()
