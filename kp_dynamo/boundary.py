"""The one place where foreign exceptions become ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kp_dynamo.exceptions import TPUBackendError, XLACompilationError


@contextlib.contextmanager
def only_our_errors() -> Iterator[None]:
    """Let no foreign exception out: torch turns some of them into a silent graph break and eager execution."""
    try:
        yield
    except TPUBackendError:
        raise
    except Exception as cause:
        raise XLACompilationError(
            f"the graph could not be compiled: {type(cause).__name__}: {cause}. "
            "Keep the failing lines out of the compiled region with torch.compiler.disable."
        ) from cause
