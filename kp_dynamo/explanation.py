"""`explain`: what the backend makes of a model, from one run of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx

from kp_dynamo import compat
from kp_dynamo.options import CompileOptions
from kp_dynamo.reports import Explanation, GraphBreak
from kp_dynamo.source_lines import frame_line

__all__ = ["Explanation", "explain"]


def explain(model: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Explanation:
    """Run `model(*args, **kwargs)` once through the backend and say what that brought about.

    Where results require a gradient the backward of their sum runs too, without touching anyone's `.grad`.

    It compiles with caches of its own, so that neither the entries nor the statistics of yours change; hits and
    misses are what `torch.compile(model, backend="kp_tpu", options=options)` would find in yours now. As
    `torch._dynamo.explain` does, it resets Dynamo before and after: functions compiled earlier are captured again
    when called. Torch's random state is given back; buffers that the model updates are updated.

    Args:
        model: A module or function, compiled or not.
        *args: What it is called with.
        options: As for `torch.compile`.
        **kwargs: What it is called with.

    Raises:
        TPUConfigurationError: The options are not valid.
        Exception: Whatever `torch.compile` or the model itself raises.
    """
    chosen = CompileOptions.from_dict(options)
    compat.device()
    # What needs torch_xla is imported once it is known to be there and to fit.
    from kp_dynamo.backend import compile_in
    from kp_dynamo.event_log import log_event
    from kp_dynamo.events import Event
    from kp_dynamo.recorder import Recorder
    from kp_dynamo.session import SESSION, Session

    recorder = Recorder(SESSION.captures.keys(), SESSION.runtime.cache.keys())

    def observe(event: Event) -> None:
        log_event(event)
        recorder(event)

    session = Session(chosen.cache_size, observe=observe)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_in(session, gm, example_inputs, chosen)

    torch._dynamo.reset()
    dynamo_before = _dynamo_seconds()
    try:
        with torch.random.fork_rng(devices=[]):
            _backward(torch.compile(_uncompiled(model), backend=backend)(*args, **kwargs))
        return Explanation(
            graph_breaks=_graph_breaks(),
            captures=tuple(recorder.captures),
            passes=tuple(recorder.passes),
            graphs=tuple(recorder.graphs()),
            fallbacks=tuple(recorder.fallbacks()),
            seconds={"dynamo": _dynamo_seconds() - dynamo_before, **recorder.seconds()},
        )
    finally:
        torch._dynamo.reset()


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model inside a compiled one: the innermost `torch.compile` would decide about the backend."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return model._orig_mod
    return torch._dynamo.eval_frame.innermost_fn(model)


def _backward(results: object) -> None:
    """Run the backward, which AOTAutograd compiles when it is first called for."""
    tensors = [r for r in torch.utils._pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.grad_fn]
    leaves = _leaves([t.grad_fn for t in tensors])
    if leaves:
        torch.autograd.grad(tensors, leaves, [torch.ones_like(t) for t in tensors], allow_unused=True)


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """The tensors to which the gradients of these autograd nodes would be added."""
    seen = set(nodes)
    for node in nodes:
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        nodes.extend(new)
    return [node.variable for node in seen if hasattr(node, "variable")]


def _dynamo_seconds() -> float:
    """Seconds that Dynamo took in this process, without its backends."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return spent.get("entire_frame_compile", 0.0) - spent.get("backend_compile", 0.0)


def _graph_breaks() -> tuple[GraphBreak, ...]:
    """Dynamo's own record since its last reset, which also knows of breaks before the first operator."""
    return tuple(_graph_break(r.reason, r.user_stack) for r in torch._dynamo.utils.graph_break_reasons)


def _graph_break(reason: str, user_stack: Sequence[FrameSummary]) -> GraphBreak:
    if not user_stack:
        return GraphBreak("", "", reason)
    frame = user_stack[-1]
    return GraphBreak(frame_line(frame.filename, frame.lineno, frame.name), frame.line or "", reason)
