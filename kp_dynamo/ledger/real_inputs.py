"""The values that a graph is run with: the arguments of the user's call, and a fixed gradient for each result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from kp_dynamo.graph.nodes import is_tangent


class NotComparable(Exception):
    """Why the numbers of a graph cannot be compared."""


def on_cpu(values: Sequence[Any]) -> list[Any]:
    """The arguments of a call as CPU tensors without gradients, which share memory with CPU arguments.

    Raises:
        NotComparable: A tensor has no values, or is of a class of its own.
    """
    return [_plain(value) for value in values]


def copies_on_cpu(values: Sequence[Any] | None) -> list[Any] | None:
    """Copies of the arguments of a call, which may be written to; None if they have no values."""
    if values is None:
        return None
    try:
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in on_cpu(values)]
    except NotComparable:
        return None


def graph_inputs(graph: fx.Graph, values: Sequence[Any]) -> list[Any]:
    """What to call an ATen graph with, in the order of its placeholders.

    Args:
        graph: A joint or inference graph.
        values: The values of its inputs, without tangents.

    Raises:
        NotComparable: AOTAutograd has merged inputs, so that the values are not those of the graph.
    """
    placeholders = graph.find_nodes(op="placeholder")
    if sum(not is_tangent(node) for node in placeholders) != len(values):
        raise NotComparable("inputs that share memory are one input of the graph")
    generator = torch.Generator().manual_seed(0)
    remaining = iter(values)
    return [_tangent(n, generator) if is_tangent(n) else _checked(n, next(remaining)) for n in placeholders]


def tangent(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The gradient of a result: one for a single number, such as a loss, and else random numbers."""
    dtype = torch.complex128 if like.is_complex() else torch.float64
    shape = [int(size) for size in like.shape]
    if like.numel() == 1:
        return torch.ones(shape, dtype=dtype).to(like.dtype)
    return torch.randn(shape, dtype=dtype, generator=generator).to(like.dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FakeTensor):
        raise NotComparable("an input has no value when the graph is compiled")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise NotComparable(f"an input is a {type(value).__name__}")
    return value.detach().cpu()


def _tangent(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    value = node.meta["val"]
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return tangent(torch.empty(sizes, dtype=value.dtype, device="meta"), generator)


def _checked(node: fx.Node, value: Any) -> Any:
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor) != isinstance(value, torch.Tensor):
        raise NotComparable(f"the input {node.name} of the graph is no argument of the call")
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in expected.shape]
        if sizes != list(value.shape) or expected.dtype != value.dtype:
            raise NotComparable(f"the input {node.name} of the graph is no argument of the call")
    return value
