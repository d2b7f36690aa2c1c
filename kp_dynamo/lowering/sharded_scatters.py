"""Scatters of sharded tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.compat import xla
from kp_dynamo.lowering.spmd import replicated
from kp_dynamo.lowering.tensor_shardings import annotated

aten = torch.ops.aten

SCATTERS = (
    aten.embedding_dense_backward.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)


def scattered(target: Any, *args: Any, **kwargs: Any) -> Any:
    """A scatter, whose tensors are replicated if a size is not a multiple of the number of devices.

    XLA's partitioner aborts the process if it must shard a dimension of a scatter unevenly (torch_xla 2.9: "Check
    failed: ShapeUtil::IsScalarWithElementType"). For a single row, it aborts if the row is sliced from sharded rows;
    then only the row is replicated. Directly after a slice, the annotation would apply to the sliced tensor, hence the
    dimension in between.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    is_uneven = any(size % xla.num_devices() for t in tensors for size in t.shape if size != 1)

    def on_all(tensor: torch.Tensor) -> torch.Tensor:
        is_whole = is_uneven or 1 in tensor.shape
        return annotated(tensor.unsqueeze(0), replicated()).squeeze(0) if is_whole else tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, on_all, (args, kwargs))
    # The result too: its readers may be sharded, and the partitioner propagates their sharding to the scatter.
    return on_all(target(*args, **kwargs))
