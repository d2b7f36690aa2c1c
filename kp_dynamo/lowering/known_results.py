"""Results of a graph that depend on none of its inputs, such as the random number that LayerDrop compares.

Ahead of time nothing runs, and Python code cannot branch on a result. Such a number can be computed beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.graph.nodes import tensor_of

_MOST_ELEMENTS = 1024  # of each value on the way: more than a number needs


def known_number(result: fx.Node) -> torch.Tensor | None:
    """The value of a result with one element, or None if it depends on an input.

    Random numbers are drawn from torch's generator, as in a call.
    """
    shown = tensor_of(result)
    if shown is None or shown.numel() != 1:
        return None
    needed = _needed(result)
    if not all(node.op == "call_function" and _is_small(node) for node in needed):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in sorted(needed):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # a function
    found: torch.Tensor = values[result]
    return found


def set_known(fake: FakeTensor, value: torch.Tensor) -> None:
    """Let Python code read the value of a fake tensor, until something unknown is written to it."""
    fake.constant = value
    # torch 2.9: a write to a fake tensor forgets the constants that are registered for its memory.
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def _needed(result: fx.Node) -> set[fx.Node]:
    """The nodes that a result is computed from, and itself."""
    found, waiting = {result}, [result]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting += new
    return found


def _is_small(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and isinstance(value.numel(), int) and value.numel() <= _MOST_ELEMENTS
