"""Helpers to run a model once through a backend and observe it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn

from kp_dynamo.compat.given_up_frames import GivenUp
from kp_dynamo.compat.module_calls import call_of
from kp_dynamo.explanation.graph_reports import GraphBreak, UncompiledFrame
from kp_dynamo.graph.source_lines import frame_line


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model inside a compiled one; otherwise the innermost `torch.compile` would select the backend."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return model._orig_mod
    return torch._dynamo.eval_frame.innermost_fn(model)


def uncompiled_call(model: Callable[..., Any]) -> Callable[..., Any]:
    """What a model does when it is called, without the compilation of `model.compile()`."""
    found = uncompiled(model)
    if isinstance(found, nn.Module) and found._compiled_call_impl is not None:
        return call_of(found)
    return found


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after the block, and restore torch's random state."""
    torch._dynamo.reset()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch._dynamo.reset()


def run_backward(results: object, model: object = None) -> None:
    """Run the backward of a model, which AOTAutograd compiles on its first run; no `.grad` changes."""
    tensors = [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn]
    leaves = _leaves(_nodes(tensors))
    if leaves:
        gradients_of(tensors, leaves, model)


def gradients_of(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], model: object
) -> list[torch.Tensor | None]:
    """The gradients of the sum of `results` by the tensors `wanted`; no `.grad` of the model changes."""
    ones, nodes = [torch.ones_like(r) for r in results], _nodes(results)
    if not any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        return list(torch.autograd.grad(results, wanted, ones, allow_unused=True))
    # checkpoint(use_reentrant=True) refuses autograd.grad. The graph does not show the leaves inside.
    inside = list(model.parameters()) if isinstance(model, nn.Module) else []
    with _fresh_gradients([*wanted, *_leaves(nodes), *inside]):
        torch.autograd.backward(results, ones)
        return [tensor.grad for tensor in wanted]


@contextlib.contextmanager
def _fresh_gradients(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """No `.grad` during the block, and the old one after it; hooks do not see the new ones, such as optimizer steps."""
    before = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks) for leaf in set(leaves)]
    for leaf, _, hooks in before:
        leaf.grad = None
        if hooks:
            leaf._post_accumulate_grad_hooks = {}  # None would leave them in force
    try:
        yield
    finally:
        for leaf, grad, hooks in before:
            leaf.grad = grad
            if hooks:
                leaf._post_accumulate_grad_hooks = hooks


def _nodes(results: Sequence[torch.Tensor]) -> list[Any]:
    """The autograd nodes of these results."""
    nodes = [r.grad_fn for r in results if r.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        nodes.extend(new)
    return nodes


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """The leaf tensors that receive gradients from these autograd nodes."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def dynamo_seconds() -> float:
    """Seconds that Dynamo has taken in this process, excluding backends."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return spent.get("entire_frame_compile", 0.0) - spent.get("backend_compile", 0.0)


def graph_breaks() -> tuple[GraphBreak, ...]:
    """The graph breaks that Dynamo recorded since its last reset, including those before the first operator."""
    return tuple(_graph_break(r.reason, r.user_stack) for r in torch._dynamo.utils.graph_break_reasons)


def uncompiled_frame(found: GivenUp) -> UncompiledFrame:
    """A frame that Dynamo gave up, for a report."""
    return UncompiledFrame(found.line or found.frame, found.reason)


def _graph_break(reason: str, user_stack: Sequence[FrameSummary]) -> GraphBreak:
    if not user_stack:
        return GraphBreak("", "", reason)
    frame = user_stack[-1]
    return GraphBreak(frame_line(frame.filename, frame.lineno, frame.name), frame.line or "", reason)
