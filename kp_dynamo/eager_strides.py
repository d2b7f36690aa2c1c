"""The strides that eager gives results, where what AOTAutograd traces has others (attention by its math form)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def eager_results(gm: fx.GraphModule) -> list[Any]:
    """The fake tensors that Dynamo computed for the results of its graph, by eager's own rules."""
    results = gm.graph.output_node().args[0]
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in flat]


def lay_out_as_eager(gm: fx.GraphModule, metadata: Any, eager: list[Any]) -> None:
    """Give the results of a forward or inference graph eager's strides: what a caller sees of tensors on the CPU.

    Strides that depend on the sizes of a call stay as they are.
    """
    results: Any = gm.graph.output_node().args[0]
    if metadata is None or len(metadata.output_info) != len(eager):
        return
    first = len(metadata.mutated_inp_runtime_indices)
    for node, expected in zip(results[first:], eager, strict=False):
        value: Any = node.meta.get("val") if isinstance(node, fx.Node) else None
        if _is_fixed(value) and _is_fixed(expected) and _differ(value, expected):
            with value.fake_mode:
                laid = torch.empty_strided(value.shape, expected.stride(), dtype=value.dtype, device=value.device)
            node.meta = {**node.meta, "val": laid}


def _is_fixed(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))


def _differ(value: torch.Tensor, expected: torch.Tensor) -> bool:
    is_same = value.shape == expected.shape and value.dtype == expected.dtype
    return is_same and value.numel() > 1 and value.stride() != expected.stride()
