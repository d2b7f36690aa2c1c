"""The one place where foreign exceptions become ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._dynamo.exc import RestartAnalysis
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from kp_dynamo.exceptions import TPUBackendError, TPUDistributedError, XLACompilationError

_NEED_A_VALUE = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def only_our_errors() -> Iterator[None]:
    """Let no foreign exception out: torch turns some of them into a silent graph break and eager execution."""
    try:
        yield
    except (TPUBackendError, RestartAnalysis):
        # The second is how AOTAutograd asks Dynamo to capture once more.
        raise
    except _NEED_A_VALUE as cause:
        if "torch_xla/distributed/spmd" in str(cause):
            raise TPUDistributedError(_marked_inside()) from cause
        raise XLACompilationError(
            f"the value of a tensor decides a shape or a branch here, and a program has fixed ones: {cause}. "
            "Compute that value outside the compiled region (torch.compiler.disable), or use a mask or a fixed size."
        ) from cause
    except Exception as cause:
        raise XLACompilationError(
            f"the graph could not be compiled: {type(cause).__name__}: {cause}. "
            "Keep the failing lines out of the compiled region with torch.compiler.disable."
        ) from cause


def _marked_inside() -> str:
    return (
        "mark_sharding of torch_xla is called inside the compiled region, and Dynamo traces its arithmetic on device "
        "numbers as if it were the model's. Allowed: mark parameters and inputs outside; inside, "
        "torch.ops.xla.dynamo_mark_sharding, whose result is the marked tensor, or what "
        "torch.compiler.disable(mark_sharding) gives."
    )
