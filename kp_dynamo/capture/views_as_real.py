"""Results of Dynamo's graph that are views of a `view_as_real`."""

from __future__ import annotations

import torch
from torch import fx


def copy_views_of_view_as_real(gm: fx.GraphModule) -> None:
    """Return copies of the results that are views of a `view_as_real`, for inputs on XLA.

    AOTAutograd would take such a view after the program. torch_xla 2.9 then aborts the process, as in eager code.
    """
    output = gm.graph.output_node()
    views = [node for node in output.all_input_nodes if _is_view_of_view_as_real(node)]
    for node in views:
        # Only at the output: inside the graph, a write to the view reaches its base.
        with gm.graph.inserting_before(output):
            copy = gm.graph.call_method("clone", (node,))
        copy.meta.update(node.meta)
        output.replace_input_with(node, copy)
    if views:
        gm.recompile()


def _is_view_of_view_as_real(node: fx.Node) -> bool:
    source = node
    while (above := _viewed(source)) is not None:
        if source is not node and source.target in (torch.view_as_real, torch.ops.aten.view_as_real.default):
            return True
        source = above
    return False


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is, or may be, a view of: tensors inside `torch.func` do not expose their storage."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return None
    above = node.all_input_nodes[0]
    one, other = (n.meta.get("example_value") for n in (node, above))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (one, other))):
        return above
    return above if one.untyped_storage()._cdata == other.untyped_storage()._cdata else None
