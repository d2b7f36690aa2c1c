"""Draws the dropout of attention's probabilities from a key. The operators of attention do so themselves.

The dropout of an attention that is refused has the same mask. One function may be captured with and without gradients,
as `torch.utils.checkpoint(use_reentrant=True)` does: it runs without them, and again with them from the same random
state. If its attention is refused in one of the two graphs only, the backward still needs the mask of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.editing import FakeRuns, erase_unused, insert_call
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.ops.dropout_mask import KEY_SIZE
from kp_dynamo.passes.attention.dropout import AppliedDropout

aten, kp = torch.ops.aten, torch.ops.kp


def key_of(random: fx.Node, insert: Callable[..., Any]) -> fx.Node:
    """A key, drawn where the random numbers were, one number for each probability."""
    value = fake_of(random).new_empty([KEY_SIZE], dtype=torch.float32)
    options = {"dtype": torch.float32, "device": value.device, "pin_memory": False}
    key: fx.Node = insert(aten.rand.default, ([KEY_SIZE],), options, like=random, value=value)
    return key


def draw_by_key(graph: fx.Graph, dropout: AppliedDropout, runs: FakeRuns) -> None:
    """Compute the mask of a dropout from a key, in place."""

    def insert(target: Any, args: Any, options: Any, **how: Any) -> Any:
        return insert_call(graph, target, args, options, runs=runs, **how)

    random, mask = dropout.random, dropout.mask
    with graph.inserting_before(mask):
        size = _size_of(random, insert)
        kept = insert(kp.dropout_mask.default, (key_of(random, insert), dropout.rate, size), {}, like=mask)
    mask.replace_all_uses_with(kept)
    graph.erase_node(mask)
    erase_random(random)


def erase_random(random: fx.Node) -> None:
    """Erase random numbers that nothing reads, which count as a side effect, and their shape's source."""
    sources = random.all_input_nodes
    random.graph.erase_node(random)
    for source in sources:
        erase_unused(source)


def _size_of(random: fx.Node, insert: Callable[..., Any]) -> list[Any]:
    """The sizes of random numbers: numbers, or nodes if they are symbolic."""
    if random.target is aten.rand.default:
        return list(random.args[0])  # type: ignore[arg-type]
    source = random.args[0]
    return [
        size if isinstance(size, int) else insert(aten.sym_size.int, (source, dim), {}, like=random)
        for dim, size in enumerate(fake_of(random).shape)
    ]
