"""The one place where foreign exceptions become ours."""

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

_NEED_A_VALUE = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def translate_errors(gm: fx.GraphModule | None = None, *, breaks_graphs: bool = False) -> Iterator[None]:
    """Let no foreign exception out, but for those that ask Dynamo for something.

    Args:
        gm: Dynamo's graph, for the lines in it.
        breaks_graphs: Let out, with our text, those at which Dynamo breaks the graph and runs the line eagerly.
    """
    try:
        yield
    except (TPUBackendError, RestartAnalysis):
        # The second is how AOTAutograd asks Dynamo to capture once more.
        raise
    except _NEED_A_VALUE as cause:
        if "torch_xla/distributed/spmd" in str(cause):
            raise TPUDistributedError(_marked_inside()) from cause
        text = _value_needed(cause)
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


# What autograd says of a program that it cannot differentiate, compiled or not.
_OF_AUTOGRAD = (
    "modified by an inplace operation",
    "the derivative for ",
    "a leaf Variable that requires grad",
    "is a view and is being modified inplace",
)


def _remedy(cause: Exception) -> str:
    if any(words in str(cause) for words in _OF_AUTOGRAD):
        return (
            "Eager may raise this as well, at the latest in the backward: see whether it does, and correct the "
            "function."
        )
    return "Keep the failing lines out of the compiled region with torch.compiler.disable."


def _value_needed(cause: Exception) -> str:
    text = f"the value of a tensor decides a shape or a branch here, and a program has fixed ones: {cause}. "
    if "operator.setitem" in str(cause):
        return (
            f"{text}An index that is a 0-dim tensor is read as a number. Write with "
            "cache.index_copy_(dim, pos.view(1), value.unsqueeze(dim)), or use a mask."
        )
    if "operator.getitem" in str(cause):
        return (
            f"{text}An index that is a 0-dim tensor is read as a number. Read with "
            "x.index_select(dim, pos.view(1)).squeeze(dim), write with x.index_copy_ or x.index_add_, or use a mask."
        )
    return (
        f"{text}Compute that value outside the compiled region (torch.compiler.disable), or use a mask or a fixed size."
    )


def _storage_replaced(gm: fx.GraphModule | None) -> str:
    nodes = gm.graph.nodes if gm is not None else ()
    where = next((user_line(n) for n in nodes if getattr(n.target, "__name__", n.target) == "set_"), "")
    return (
        f"a tensor that comes from outside gets other storage, by an assignment to .data or by set_{where}, and a "
        "program writes new values only into the storage that is there. Allowed: x.data.copy_(value), "
        "x.data.mul_(0.5). Write so, or keep that line out of the compiled region with torch.compiler.disable."
    )


def _marked_inside() -> str:
    return (
        "mark_sharding of torch_xla is called inside the compiled region, and Dynamo traces its arithmetic on device "
        "numbers as if it were the model's. Allowed: mark parameters and inputs outside; inside, "
        "torch.ops.xla.dynamo_mark_sharding, whose result is the marked tensor, or what "
        "torch.compiler.disable(mark_sharding) gives."
    )
