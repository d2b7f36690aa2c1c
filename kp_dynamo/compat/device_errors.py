"""Let Dynamo's error for tensors on two devices say where they meet and what to do, in traces for kp_tpu.

torch 2.9 stops at the first operator with such operands, before it calls the backend. Its own message prints the fake
tensors of the operator ("Unhandled FakeTensor Device Propagation"), without the module.
"""

from __future__ import annotations

import functools
from typing import Any

import torch._dynamo.utils as dynamo_utils
from torch._dynamo.exc import TorchDynamoException

from kp_dynamo.compat.dynamo_trace import backend_of_frame
from kp_dynamo.compat.versions import earlier_version

_MESSAGE = "found two different devices"


@functools.cache
def install() -> None:
    """Patch how Dynamo computes a node with fake tensors, before a trace for the backend or for `aot`.

    A backend has the message as its function `explain_devices`, of the node.
    """
    if earlier_version() is not None:
        return
    run_node = dynamo_utils.run_node

    @functools.wraps(run_node)
    def run(tracer: Any, node: Any, *rest: Any) -> Any:
        try:
            return run_node(tracer, node, *rest)
        except TorchDynamoException:
            raise  # a graph break
        except RuntimeError as error:
            explain = getattr(backend_of_frame(), "explain_devices", None) if _MESSAGE in str(error) else None
            problem = explain(node) if explain is not None else None
            if problem is None:
                raise
            raise RuntimeError(problem).with_traceback(error.__traceback__) from error

    dynamo_utils.run_node = run  # type: ignore[assignment]
