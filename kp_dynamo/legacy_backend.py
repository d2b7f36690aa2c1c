"""torch_xla 2.5 to 2.8: no lowering and no passes of ours, torch_xla's own bridge and a warning of what it gets wrong.

Our lowering stands on placeholder tensors and other entry points that came with torch_xla 2.9.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.capture.tensor_devices import placement_mode
from kp_dynamo.compat.known_limits import EARLIER_LIMITS
from kp_dynamo.compat.versions import CURE
from kp_dynamo.config.options import CompileOptions, option_fields
from kp_dynamo.error_boundary import translate_errors
from kp_dynamo.exceptions import TPUConfigurationError, TPUDeviceError

logger = logging.getLogger(__name__)

# Values that ask for nothing of ours; of all other options, the default.
_ASKS_NOTHING: dict[str, object] = {"lowering": "stock", "precision": "float32", "checkpoint": "off", "fuse": False}


def compile_with_stock(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, version: str
) -> Callable[..., Any]:
    """What torch_xla's own backend makes of a graph that Dynamo captured.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs, on the XLA device.
        options: `lowering` is "stock", and nothing else asks for what is not here.
        version: Of torch_xla, for messages.

    Raises:
        TPUConfigurationError: An option that would have no effect.
        TPUDeviceError: Tensors that are not on the XLA device: this bridge would not compile them.
    """
    _require_nothing_of_ours(options, version)
    tensors = [x for x in [*gm.parameters(), *gm.buffers(), *inputs] if isinstance(x, torch.Tensor)]
    if tensors and placement_mode(tensors, default="xla") != "xla":
        raise TPUDeviceError(
            f"tensors are on the CPU, and the bridge of torch_xla {version} compiles only what is on the XLA device. "
            f"Move model and inputs there: .to('xla'); or use torch_xla 2.9, where it is done for you: {CURE}"
        )
    _warn(version)
    with translate_errors():
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("openxla")(gm, list(inputs))
    return compiled


def _require_nothing_of_ours(options: CompileOptions, version: str) -> None:
    if options.lowering != "stock":
        raise TPUConfigurationError(
            f"lowering='openxla' needs torch_xla 2.9, and {version} is installed. Allowed with it: "
            f"options={{'lowering': 'stock'}}, torch_xla's own bridge, which is wrong in known cases. Cure: {CURE}"
        )
    for option in option_fields():
        idle = _ASKS_NOTHING.get(option.name, option.default)
        if option.name in options.given and (option.name == "level" or getattr(options, option.name) != idle):
            raise TPUConfigurationError(
                f"option {option.name!r} has no effect with torch_xla {version}, where lowering='stock' is "
                f"torch_xla's own bridge without our passes and caches. Leave it out. Cure: {CURE}"
            )


@functools.cache
def _warn(version: str) -> None:
    """Once a process."""
    known = "\n".join(f"* {limit.what} {limit.cure}" for limit in EARLIER_LIMITS)
    logger.warning(
        "torch_xla %s: lowering='stock' hands graphs to torch_xla's own bridge. Nothing is cast, fused or "
        "checkpointed, kp_dynamo.cache_stats() counts nothing, and this is known to be wrong there:\n%s\nCure: %s",
        version,
        known,
        CURE,
    )
