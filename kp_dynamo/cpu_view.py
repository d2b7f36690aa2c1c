"""Dynamo's graph and inputs, seen as if everything were on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")


def name_the_cpu(gm: fx.GraphModule) -> None:
    """Rewrite the device arguments of `gm`, and of the graphs inside it, from XLA to the CPU.

    In place: AOTAutograd reads what Dynamo has hung on this very module and its nodes.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and any([_rewrite_devices(node) for node in module.graph.nodes]):
            module.recompile()


def _rewrite_devices(node: fx.Node) -> bool:
    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _to_cpu)  # type: ignore[misc]
    is_changed = (args, kwargs) != (node.args, node.kwargs)
    if is_changed:
        node.args, node.kwargs = args, kwargs
    return is_changed


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

