"""Helpers to run a model once through a backend and observe it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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


def run_backward(results: object) -> None:
    """Run the backward, which AOTAutograd compiles on its first run."""
    tensors = [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn]
    leaves = _leaves([t.grad_fn for t in tensors])
    if leaves:
        torch.autograd.grad(tensors, leaves, [torch.ones_like(t) for t in tensors], allow_unused=True)


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """The leaf tensors that receive gradients from these autograd nodes."""
    seen = set(nodes)
    for node in nodes:
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        nodes.extend(new)
    return [node.variable for node in seen if hasattr(node, "variable")]


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
