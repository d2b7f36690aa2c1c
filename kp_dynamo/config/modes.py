"""The argument `mode` of `torch.compile`: the modes of Inductor that mean something to this backend."""

from __future__ import annotations

import functools
import logging

from kp_dynamo.exceptions import TPUConfigurationError

logger = logging.getLogger(__name__)


def accept_mode(mode: object) -> None:
    """Raise unless `mode` asks for what the backend does anyway.

    "reduce-overhead" asks for one launch a call instead of one an operator. A compiled graph is one XLA program, so
    that is what "default" does too.

    Raises:
        TPUConfigurationError: Any other mode of Inductor.
    """
    if mode == "reduce-overhead":
        _log_reduce_overhead()
    elif mode not in (None, "default"):
        raise TPUConfigurationError(
            f"mode={mode!r} is invalid: it is a mode of Inductor. Allowed: mode='default', 'reduce-overhead'. "
            "Try: options={'level': ...}."
        )


@functools.cache
def _log_reduce_overhead() -> None:
    """Once per process, because Dynamo passes the mode with every graph."""
    logger.info("mode='reduce-overhead' is taken as 'default': a compiled graph already runs as one XLA program.")
