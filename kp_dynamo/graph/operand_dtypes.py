"""Operands whose dtypes eager refuses: torch's fake tensors accept some of them, and XLA would compute a result."""

from __future__ import annotations

import torch
from torch import fx

from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.graph.nodes import calls, tensor_of
from kp_dynamo.graph.places import place_of

aten = torch.ops.aten

_MATMULS = (
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default, aten.dot.default,
)  # fmt: skip
_EMBEDDINGS = (aten.embedding.default,)


def check_operand_dtypes(graph: fx.Graph) -> None:
    """Raise eager's error for a matmul of several dtypes, and for an embedding of indices that are no integers.

    Raises:
        XLACompilationError: The message names the dtypes, and the module or line.
    """
    for node in calls(graph, *_MATMULS, *_EMBEDDINGS):
        is_matmul = node.target in _MATMULS
        problem = _problem_of_matmul(node) if is_matmul else _problem_of_indices(node)
        if problem:
            place = place_of(node).text(verbose=True)
            raise XLACompilationError(f"{problem}{f' ({place})' if place else ''}. Eager raises as well.")


def _problem_of_matmul(node: fx.Node) -> str | None:
    dtypes = [value.dtype for x in node.args if (value := tensor_of(x)) is not None]
    if len(set(dtypes)) == 1:
        return None
    # As F.linear passes them: the bias, the input, the transposed weight.
    names = ("bias", "mat1", "mat2") if len(dtypes) == 3 else ("mat1", "mat2")
    found = ", ".join(f"{name} {dtype}" for name, dtype in zip(names, dtypes, strict=True))
    return f"the operands of a matmul must have the same dtype, but got {found}; convert one of them with .to(dtype)"


def _problem_of_indices(node: fx.Node) -> str | None:
    indices = tensor_of(node.args[1])
    if indices is None or indices.dtype in (torch.int32, torch.int64):
        return None
    return f"the indices of an embedding must be int64 or int32, but got {indices.dtype}; convert them with .long()"
