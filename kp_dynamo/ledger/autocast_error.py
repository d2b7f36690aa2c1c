"""The error of eager autocast on the user's inputs, which bounds that of a graph with bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from kp_dynamo.ledger.float64 import call_in_float64, raised
from kp_dynamo.ledger.graph_run import draws_nothing, eagerly, is_pure_draw
from kp_dynamo.ledger.real_inputs import NotComparable, tangent
from kp_dynamo.ledger.relative_errors import Outputs
from kp_dynamo.passes.base import Errors


def autocast_errors(gm: fx.GraphModule, inputs: Sequence[Any], values: Sequence[Any], *, trains: bool) -> Errors:
    """The errors of eager `torch.autocast("cpu", torch.bfloat16)` against eager float64.

    Args:
        gm: Dynamo's graph.
        inputs: Its example inputs, which say what requires a gradient.
        values: Their values, as CPU tensors; they are not written to.
        trains: Whether gradients are compared, too.

    Raises:
        NotComparable: The graph cannot be run like this.
    """
    draws: list[torch.Tensor] = []
    computed: list[int] = []
    try:
        with eagerly(), torch.set_grad_enabled(trains):
            with torch.autocast("cpu", torch.bfloat16), _Calls(draws, None):
                narrow = _outputs(gm, _arguments(inputs, values), computed)
            with _Calls(draws, iter(list(draws))):
                exact = _outputs(gm, _arguments(inputs, raised(list(values))), computed)
    except NotComparable:
        raise
    except Exception as cause:
        # Operators may raise anything; the graph is compiled all the same.
        text = str(cause).strip().splitlines() or [""]
        raise NotComparable(f"{type(cause).__name__}: {text[0]}") from cause
    errors = narrow.errors(exact)
    if not errors.are_finite:
        raise NotComparable("it overflows")
    return errors


def _arguments(inputs: Sequence[Any], values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs (leaf, argument) of copies. A non-leaf argument is a clone of its leaf. Without gradient, leaf is None."""
    return [_argument(like, value) for like, value in zip(inputs, values, strict=True)]


def _argument(like: Any, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, torch.Tensor):
        return None, value
    copy = value.clone()
    if not like.requires_grad:
        return None, copy
    leaf = copy.requires_grad_()
    return leaf, leaf if like.is_leaf else leaf.clone()


def _outputs(gm: fx.GraphModule, arguments: Sequence[tuple[Any, Any]], computed: list[int]) -> Outputs:
    """The results and gradients of a run, of the results at `computed`; if it is empty, it is filled."""
    given = [argument for _, argument in arguments]
    versions = [_version(argument) for argument in given]
    returned = list(gm(*given))
    written = [x for x, version in zip(given, versions, strict=True) if _version(x) != version]
    # As in the graph that the passes see: a view of an argument is no result, and a written argument is one.
    computed += [] if computed else [i for i, r in enumerate(returned) if not _is_view_of_one(r, given)]
    results = [*written, *(returned[i] for i in computed)]
    leaves = [leaf for leaf, _ in arguments if leaf is not None]
    tracked = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not leaves or not tracked:
        return Outputs(results)
    generator = torch.Generator().manual_seed(0)
    tangents = [tangent(r, generator) for r in tracked]
    gradients = torch.autograd.grad(tracked, leaves, tangents, allow_unused=True)
    return Outputs([r.detach() if isinstance(r, torch.Tensor) else r for r in results], gradients)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0


def _is_view_of_one(result: Any, given: Sequence[Any]) -> bool:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    strided = (x for x in given if isinstance(x, torch.Tensor) and x.layout is torch.strided)
    return any(x.untyped_storage()._cdata == result.untyped_storage()._cdata for x in strided)


class _Calls(TorchDispatchMode):
    """Records what random operators draw; or uses it again, and computes in float64.

    Args:
        draws: Recorded here.
        again: What to use again, or None while it is recorded.
    """

    def __init__(self, draws: list[torch.Tensor], again: Iterator[torch.Tensor] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._again = draws, again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing(func, args, kwargs)
        if is_random and kwargs.get("generator") is None:
            return self._drawn(func, args, kwargs)
        return func(*args, **kwargs) if self._again is None else call_in_float64(func, args, kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_pure_draw(func):
            raise NotComparable(f"{func} computes with random numbers that it draws itself")
        if self._again is None:
            drawn = func(*args, **kwargs)
            self._draws.append(drawn.detach().clone())
            return drawn
        drawn = next(self._again, None)
        if drawn is None or (func._schema.is_mutable and drawn.shape != args[0].shape):
            raise NotComparable("it draws other random numbers in float64")
        return args[0].copy_(drawn) if func._schema.is_mutable else raised(drawn)
