"""Cross entropies of several positions, [B, V, S]: the logits of a language model whose classes were moved second."""

from __future__ import annotations

import operator
from itertools import dropwhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from kp_dynamo.capture.grad_modes import before_a_change
from kp_dynamo.capture.insertion import insert_call, value_of

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_MATMULS = (F.linear, torch.matmul, operator.matmul, "matmul", "__matmul__")


def move_classes_last(gm: fx.GraphModule) -> None:
    """Compute such a cross entropy from rows of classes, [B * S, V], in place.

    `F.cross_entropy(logits.transpose(1, 2), target)` is the loss of `logits.view(-1, V)`, whose rows lie together in
    memory. Torch computes it as that of an image, [B, V, 1, S], which `fuse_linear_cross_entropy` does not match.
    Images stay as they are, whose classes are second in memory too.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            losses = [node for node in module.graph.nodes if node.target is F.cross_entropy]
            found = {node: rows for node in losses if (rows := _rows_of(node)) is not None}
            for node, rows in found.items():
                _rewrite(node, rows)
            if found:
                module.recompile()


def _rows_of(node: fx.Node) -> fx.Node | None:
    """The rows [B, S, ..., V] whose view [B, V, S, ...] are the logits, if a matmul computes them."""
    given = _arguments(node)
    logits, target = (value_of(given[name]) for name in ("input", "target"))
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or logits.dim() < 3:
        return None
    is_legacy = given.get("size_average") is not None or given.get("reduce") is not None
    if is_legacy or target.is_floating_point() or target.dim() != logits.dim() - 1:
        return None
    source = _source(given["input"])
    rows = value_of(source)
    if source is None or not isinstance(rows, torch.Tensor) or not _is_view(logits, rows):
        return None
    if _changes_grad_mode(source, given["input"]):
        return None  # a view made under `no_grad` passes no gradient on
    is_moved = logits.movedim(1, -1).shape == rows.shape and logits.movedim(1, -1).stride() == rows.stride()
    return source if is_moved and _is_from_matmul(source) else None


def _is_view(value: torch.Tensor, source: torch.Tensor) -> bool:
    is_alias = value.untyped_storage()._cdata == source.untyped_storage()._cdata
    return is_alias and value.storage_offset() == source.storage_offset()


def _changes_grad_mode(first: fx.Node, last: fx.Node) -> bool:
    """Whether the grad mode is set between two nodes. Inside `torch.func`, values have the flags of its transform."""
    following = dropwhile(lambda node: node is not first, first.graph.nodes)
    return last not in before_a_change(following)


def _is_from_matmul(node: fx.Node | None) -> bool:
    """Whether a node is computed from a matmul, operand by first operand.

    In eager, the gradient of the logits has their strides. If it ends in a matmul, no one sees them.
    """
    while node is not None and node.target not in _MATMULS:
        node = _source(node)
    return node is not None


def _source(node: Any) -> fx.Node | None:
    source = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return source if isinstance(source, fx.Node) else None


def _rewrite(node: fx.Node, rows: fx.Node) -> None:
    given = _arguments(node)
    del given["input"]
    target = given.pop("target")
    with node.graph.inserting_before(node):
        flat = insert_call(node, torch.flatten, target)
        loss = insert_call(node, F.cross_entropy, insert_call(node, torch.flatten, rows, 0, -2), flat, **given)
        if given.get("reduction") == "none":
            loss = insert_call(node, "view_as", loss, target)
    node.replace_all_uses_with(loss)
    node.graph.erase_node(node)


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
