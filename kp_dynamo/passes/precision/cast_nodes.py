"""Recognizes casts between float32 and bfloat16, and looks for the values before views of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import PARTS, VIEWS
from kp_dynamo.graph.waiting import waited_for

aten = torch.ops.aten

ADDED = "added_by_cast_bf16"
"""Key in the meta of a cast that the pass added."""


def is_float32(node: object) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.float32


def is_bfloat16(node: object) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bfloat16


def is_downcast(node: fx.Node) -> bool:
    """Whether `node` is a cast from float32 to bfloat16 and nothing else."""
    return _is_plain_cast(node) and is_float32(node.args[0]) and is_bfloat16(node)


def is_upcast(node: fx.Node) -> bool:
    """Whether `node` is a cast from bfloat16 to float32 and nothing else."""
    return _is_plain_cast(node) and is_bfloat16(node.args[0]) and is_float32(node)


def origins(node: fx.Node) -> Iterator[fx.Node]:
    """The values that `node` is views, slices and concatenations of, before a wait for other values."""
    waiting = waited_for(node)
    if waiting is not None:
        yield from origins(waiting)
        return
    # Other sources are symbolic sizes, or multi-output ops that getitem reads.
    sources = [s for s in node.all_input_nodes if tensor_of(s) is not None or s.target in VIEWS + PARTS]
    if node.target not in VIEWS + PARTS or not sources:
        yield node
        return
    for source in sources:
        yield from origins(source)


def _is_plain_cast(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    plain: dict[str, tuple[Any, ...]] = {
        "layout": (None, torch.strided), "device": (None, torch.device("cpu")), "pin_memory": (None, False),
        "non_blocking": (None, False), "memory_format": (None, torch.preserve_format),
    }  # fmt: skip
    return all(key == "dtype" or value in plain[key] for key, value in node.kwargs.items())
