"""Dynamo's graph and inputs, seen as if everything were on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")


def graph_on_cpu(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` whose device arguments name the CPU; `gm` itself where none names another."""
    if not any(_names_xla(node) for node in gm.graph.nodes):
        return gm
    copy = fx.GraphModule(gm, fx.Graph())
    copy.graph.output(copy.graph.graph_copy(gm.graph, {}))
    for node in copy.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _to_cpu)  # type: ignore[misc, assignment]
    copy.recompile()
    return copy


def _names_xla(node: fx.Node) -> bool:
    found = [False]

    def look(value: Any) -> Any:
        found[0] |= _is_xla(value)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), look)
    return found[0]


def _is_xla(value: Any) -> bool:
    if isinstance(value, str):
        return value == "xla" or value.startswith("xla:")
    return isinstance(value, torch.device) and value.type == "xla"


def _to_cpu(value: Any) -> Any:
    if not _is_xla(value):
        return value
    return "cpu" if isinstance(value, str) else _CPU


def inputs_on_cpu(inputs: Sequence[Any]) -> list[Any]:
    """`inputs` with every XLA tensor replaced by a CPU fake tensor of the same metadata; one fake a tensor."""
    mode = _fake_mode()
    fakes: dict[int, torch.Tensor] = {}
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.device.type == "xla" and id(x) not in fakes:
            fakes[id(x)] = _cpu_fake(x, mode)
    return [fakes.get(id(x), x) for x in inputs]


def _fake_mode() -> FakeTensorMode:
    context = TracingContext.try_get()
    return context.fake_mode if context is not None and context.fake_mode is not None else FakeTensorMode()


def _cpu_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    like = tensor if isinstance(tensor, FakeTensor) else _dynamo_fake(tensor, mode)
    with torch.inference_mode(tensor.is_inference()), mode:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        if not tensor.requires_grad:
            return fake
        leaf = fake.requires_grad_()
        with torch.enable_grad():
            return leaf if tensor.is_leaf else leaf.clone()


def _dynamo_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """The fake that Dynamo made of `tensor`, with the symbols and sources of its sizes."""
    context = TracingContext.try_get()
    symbolic = context.tensor_to_context.get(tensor) if context is not None else None
    if symbolic is None:
        return mode.from_tensor(tensor, static_shapes=True)
    return mode.from_tensor(tensor, symbolic_context=symbolic, source=symbolic.tensor_source, trace=False)

