"""Dropout that drops nothing: eager returns its operand, not a copy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from kp_dynamo.capture.insertion import insert_call, value_of

# Each takes (input, p, training).
_DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout,
    torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
)  # fmt: skip

# Of an operand without a batch, these return a view.
_DIMS_WITHOUT_BATCH: dict[Any, int] = {F.dropout1d: 2, F.dropout3d: 4}


def remove_inactive_dropout(gm: fx.GraphModule) -> None:
    """Replace dropout in evaluation, or with p=0, by its operand, in place.

    AOTAutograd of torch 2.9 copies the operand. In eager, a write to the result reaches the operand, as in
    `h = dropout(x); h += y`, where x is read again.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            inactive = [n for n in module.graph.nodes if n.target in _DROPOUTS and _is_inactive(n)]
            for node in inactive:
                node.replace_all_uses_with(_eager_result(node))
                module.graph.erase_node(node)
            if inactive:
                module.recompile()


def _is_inactive(node: fx.Node) -> bool:
    p, training = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", True)
    training = node.kwargs.get("train", training)
    return training is False or (isinstance(p, (int, float)) and p == 0)


def _eager_result(node: fx.Node) -> fx.Node:
    """The operand, or a view of it, which passes no gradient on where it is made under `no_grad`."""
    operand, dims = _argument(node, 0, "input", None), _DIMS_WITHOUT_BATCH.get(node.target)
    if dims is None or value_of(operand).dim() != dims:
        return operand  # type: ignore[no-any-return]
    with node.graph.inserting_before(node):
        return insert_call(node, "view_as", operand, operand)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
