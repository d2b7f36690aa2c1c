"""What depends on the tensors of a call to what AOTAutograd has compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kp_dynamo.autograd.argument_overlap import OverlapCheck
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.undefined_gradients import UndefinedGradients


def as_called(
    run: Callable[..., Any],
    aliases: ResultAliases,
    overlap: OverlapCheck | None,
    gradients: UndefinedGradients | None,
) -> Callable[..., Any]:
    """`run`, with checks of its arguments, the views of them that it returns, and its backward's undefined gradients.

    Args:
        run: What AOTAutograd has compiled.
        aliases: The results that share memory.
        overlap: Compares the overlap of arguments; None for a graph that writes to none.
        gradients: Which gradients may be undefined; None where all hang on all results.
    """
    if overlap is None and gradients is None and not aliases.has_views_of_arguments:
        return run

    def called(*args: Any) -> Any:
        if overlap is not None:
            overlap.require_same(args)
        with where_views_can_be_taken(args, aliases):
            results = list(run(*args))
            if aliases.has_symbolic_views:
                aliases.replay(args, results)
        if gradients is not None:
            gradients.watch(results)
        return results

    return called


def where_views_can_be_taken(args: Sequence[Any], aliases: ResultAliases) -> contextlib.AbstractContextManager[Any]:
    """torch_xla 2.9: in inference mode no view of an ordinary tensor can be taken, in eager code too."""
    if not torch.is_inference_mode_enabled() or not aliases.has_views_of_arguments:
        return contextlib.nullcontext()
    ordinary = (isinstance(a, torch.Tensor) and a.device.type == "xla" and not a.is_inference() for a in args)
    return _no_grad_mode() if any(ordinary) else contextlib.nullcontext()


@contextlib.contextmanager
def _no_grad_mode() -> Iterator[None]:
    """`no_grad` in the place of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
