"""Translate exceptions of torch and torch_xla into this package's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import fx
from torch._dynamo.exc import RestartAnalysis, exceptions_allowed_to_be_fallback
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedMutationAliasingException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from kp_dynamo.exceptions import TPUBackendError, TPUDistributedError, XLACompilationError
from kp_dynamo.graph.source_lines import user_line

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def translate_errors(gm: fx.GraphModule | None = None, *, breaks_graphs: bool = False) -> Iterator[None]:
    """Translate every exception except those that Dynamo handles itself.

    Args:
        gm: Dynamo's graph, for its source lines.
        breaks_graphs: Whether to re-raise, with our message, exceptions at which Dynamo breaks the graph and runs the
            line eagerly.
    """
    try:
        yield
    except (TPUBackendError, RestartAnalysis):
        # AOTAutograd raises RestartAnalysis to make Dynamo capture again.
        raise
    except _DATA_DEPENDENT as cause:
        if "torch_xla/distributed/spmd" in str(cause):
            raise TPUDistributedError(_sharding_marked_in_graph()) from cause
        text = _data_dependent(cause)
        if breaks_graphs and isinstance(cause, exceptions_allowed_to_be_fallback):
            cause.args = (text,)
            raise
        raise XLACompilationError(text) from cause
    except Exception as cause:
        if breaks_graphs and isinstance(cause, exceptions_allowed_to_be_fallback):
            raise
        if isinstance(cause, AssertionError) and "Encountered a set_ on a graph input" in str(cause):
            kind = UnsupportedMutationAliasingException if breaks_graphs else XLACompilationError
            raise kind(_storage_replaced(gm)) from cause
        reason = f"the graph could not be compiled: {type(cause).__name__}: {cause}"
        raise XLACompilationError(f"{reason.rstrip('.')}. {_remedy(cause)}") from cause


# Autograd's messages for functions that it cannot differentiate, compiled or not.
_AUTOGRAD_MESSAGES = (
    "modified by an inplace operation",
    "the derivative for ",
    "a leaf Variable that requires grad",
    "is a view and is being modified inplace",
)


def _remedy(cause: Exception) -> str:
    if any(words in str(cause) for words in _AUTOGRAD_MESSAGES):
        return "Eager may raise this as well, perhaps only in the backward. Try: run it eagerly and fix the function."
    return "Try: keep the failing lines out of the compiled region with torch.compiler.disable."


def _data_dependent(cause: Exception) -> str:
    text = f"a shape or a branch depends on the value of a tensor, but a compiled program has fixed ones: {cause}. "
    if "operator.setitem" in str(cause):
        return (
            f"{text}An index that is a 0-dim tensor is read as a number. Try: write with "
            "cache.index_copy_(dim, pos.view(1), value.unsqueeze(dim)), or use a mask."
        )
    if "operator.getitem" in str(cause):
        return (
            f"{text}An index that is a 0-dim tensor is read as a number. Try: read with "
            "x.index_select(dim, pos.view(1)).squeeze(dim), write with x.index_copy_ or x.index_add_, or use a mask."
        )
    return (
        f"{text}Try: compute that value outside the compiled region (torch.compiler.disable), or use a mask or a "
        "fixed size."
    )


def _storage_replaced(gm: fx.GraphModule | None) -> str:
    nodes = gm.graph.nodes if gm is not None else ()
    where = next((user_line(n) for n in nodes if getattr(n.target, "__name__", n.target) == "set_"), "")
    return (
        f"the storage of a graph input is replaced, by an assignment to .data or by set_{where}, but a compiled "
        "program only writes new values into existing storage. Allowed: x.data.copy_(value), x.data.mul_(0.5). "
        "Try: use these, or keep that line out of the compiled region with torch.compiler.disable."
    )


def _sharding_marked_in_graph() -> str:
    return (
        "mark_sharding of torch_xla is called inside the compiled region, and Dynamo traces its arithmetic on device "
        "numbers as if it were the model's. Allowed: outside, marking parameters and inputs; inside, "
        "torch.ops.xla.dynamo_mark_sharding, whose result is the marked tensor, or the function that "
        "torch.compiler.disable(mark_sharding) returns."
    )
