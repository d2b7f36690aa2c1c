"""Wraps what AOTAutograd compiled with the work that depends on the tensors of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kp_dynamo.autograd.argument_overlap import OverlapCheck
from kp_dynamo.autograd.backward_nodes import pass_on_undefined
from kp_dynamo.autograd.plain_gradient import Gradients
from kp_dynamo.autograd.result_aliases import ResultAliases
from kp_dynamo.autograd.undefined_gradients import UndefinedGradients


def outside_dynamo(backward: Callable[..., Any]) -> Any:
    """A compiled backward that Dynamo does not trace, for AOTAutograd."""
    run = torch._dynamo.disable(backward, reason="a compiled backward")
    run._boxed_call = True
    return run


def with_call_checks(
    run: Callable[..., Any],
    aliases: ResultAliases | None,
    overlap: OverlapCheck | None,
    gradients: UndefinedGradients | None,
    made: Gradients,
) -> Callable[..., Any]:
    """`run` with checks of its arguments, the views of them it returns, and a backward that knows undefined gradients.

    Args:
        run: The callable that AOTAutograd compiled.
        aliases: The results that share memory, or None.
        overlap: Compares the overlap of arguments; None for a graph that writes to none of them.
        gradients: Which gradients may be undefined; None without a backward.
        made: How AOTAutograd made it differentiable.
    """
    if gradients is not None and made.plain is None:
        made.at_node.append(pass_on_undefined)
    if gradients is not None and not gradients.is_uniform:
        made.at_node.append(gradients.watch)
    if overlap is None and (aliases is None or not aliases.has_views_of_arguments):
        return run

    def called(*args: Any) -> Any:
        if overlap is not None:
            overlap.require_same(args)
        with allow_views(args, aliases):
            results = list(run(*args))
            if aliases is not None and aliases.has_symbolic_views:
                aliases.replay(args, results)
        return results

    return called


def allow_views(args: Sequence[Any], aliases: ResultAliases | None) -> contextlib.AbstractContextManager[Any]:
    """torch_xla 2.9 cannot take a view of a normal tensor in inference mode, not even in eager code."""
    if aliases is None or not torch.is_inference_mode_enabled() or not aliases.has_views_of_arguments:
        return contextlib.nullcontext()
    ordinary = (isinstance(a, torch.Tensor) and a.device.type == "xla" and not a.is_inference() for a in args)
    return _no_grad_mode() if any(ordinary) else contextlib.nullcontext()


@contextlib.contextmanager
def _no_grad_mode() -> Iterator[None]:
    """Replace inference mode by `no_grad`."""
    with torch.inference_mode(False), torch.no_grad():
        yield
