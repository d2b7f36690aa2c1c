"""Compiles a model that returns its logits beside the loss without the gradient of the logits, and adds it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from kp_dynamo.autograd.replayed_gradient import Replay, with_gradient
from kp_dynamo.blocks.returned_logits import ReturnedLogits, separate_logits
from kp_dynamo.pipeline import least_fused_logits
from kp_dynamo.session.compile_plan import CompilePlan


def separated_logits(plan: CompilePlan) -> ReturnedLogits | None:
    """Take the gradient of returned logits out of the capture of a plan, so that a pass can fuse them with their loss.

    Returns:
        The logits, or None if the capture stays as it is.
    """
    least = least_fused_logits(plan.pipeline)
    # The padding of results is cut off outside, but here a gradient would read it.
    if least is None or plan.bucketing is not None or not plan.capture.records_gradients:
        return None
    return separate_logits(plan.capture.gm, least)


def with_gradient_of(
    logits: ReturnedLogits,
    run: Callable[..., Any],
    mode: str,
    compile_later: Callable[[fx.GraphModule], Callable[..., Any]],
) -> Callable[..., Any]:
    """`run`, whose logits have a gradient again.

    Args:
        logits: What `separated_logits` returned.
        run: The compiled capture.
        mode: Where its tensors are, see `Capture`.
        compile_later: `torch.compile` with this backend.
    """
    # In a graph of XLA tensors, the two devices of autocast regions are exchanged.
    names = {"cpu": "xla", "xla": "cpu"} if mode == "xla" else {}
    autocasts = tuple((names.get(device, device), *rest) for device, *rest in logits.autocasts)
    # A report ahead of time is about the step that has no such gradient.
    piece = logits.piece if mode == "fake" else compile_later(logits.piece)
    replay = Replay(piece, logits.is_read, autocasts)

    def called(*args: Any) -> list[Any]:
        results = list(run(*args))
        sources = [results[-1] if place is None else args[place] for place in logits.sources]
        results[logits.position] = with_gradient(results[logits.position], replay, sources)
        return results[:-1] if None in logits.sources else results

    return called
