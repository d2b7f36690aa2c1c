"""Under SPMD: the large tensors of a run that every device holds whole. Nothing of that size is replicated silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kp_dynamo.explanation.graph_reports import WholeTensor
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.lowering import is_spmd, shardings
from kp_dynamo.runtime.events import ProgramReady
from kp_dynamo.sharding import large_tensors
from kp_dynamo.sharding.placement import REPLICATED


def whole_tensors(model: Any, programs: Sequence[ProgramReady]) -> tuple[WholeTensor, ...]:
    """The model's own tensors above `LARGE_BYTES`, and the arguments of programs, that are whole; largest first.

    What a program returns is named if another program reads it, such as an activation that the backward reads. An
    argument with the sizes of a tensor that has a name already is not named again.
    """
    if not is_spmd():
        return ()
    found: dict[tuple[str, tuple[int, ...]], list[WholeTensor]] = {}
    for tensor in _of_model(model):
        found.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    for tensor in (argument for program in programs for argument in _arguments(program)):
        found.setdefault((tensor.dtype, tensor.shape), [tensor])
    return tuple(sorted((t for group in found.values() for t in group), key=lambda t: -t.size_bytes))


def _of_model(model: Any) -> Iterator[WholeTensor]:
    if not isinstance(model, nn.Module):
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    for (name, tensor), text in zip(named, shardings([tensor for _, tensor in named]), strict=True):
        yield from _if_whole(name, tensor, text)


def _arguments(program: ProgramReady) -> Iterator[WholeTensor]:
    parts: Mapping[str, Any] = dict(program.key.parts)
    nodes = [n for n in program.gm.graph.find_nodes(op="placeholder") if tensor_of(n) is not None]
    for node, text in zip(nodes, parts.get("shardings") or (), strict=False):
        yield from _if_whole(f"{node.name} of {program.label}", node.meta["val"], text)


def _if_whole(name: str, tensor: torch.Tensor, text: str) -> Iterator[WholeTensor]:
    if text != REPLICATED or not all(isinstance(size, int) for size in tensor.shape):
        return
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes > large_tensors.LARGE_BYTES:
        yield WholeTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size_bytes)
