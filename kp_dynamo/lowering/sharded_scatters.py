"""Scatters of tensors that several devices share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.compat import xla
from kp_dynamo.lowering.spmd import annotated, replicated

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
    """A scatter; of tensors that every device has all of, where a size is no multiple of the devices.

    XLA's partitioner ends the process where it has to share out a dimension of one unevenly (torch_xla 2.9: "Check
    failed: ShapeUtil::IsScalarWithElementType"). Of a single row it does so where that is cut from shared rows: then
    the row alone goes to every device. Behind a slice it takes the mark for one of what was sliced, hence the dimension
    in between.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    is_uneven = any(size % xla.num_devices() for t in tensors for size in t.shape if size != 1)

    def on_all(tensor: torch.Tensor) -> torch.Tensor:
        is_whole = is_uneven or 1 in tensor.shape
        return annotated(tensor.unsqueeze(0), replicated()).squeeze(0) if is_whole else tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, on_all, (args, kwargs))
    # The result too: what reads it may be shared, and the partitioner gives the scatter the sharding of its readers.
    return on_all(target(*args, **kwargs))
