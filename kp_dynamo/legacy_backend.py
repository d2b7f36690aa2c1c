"""The backend for torch_xla 2.5 to 2.8: torch_xla's own bridge, without our lowering and passes, and with a warning.

Our lowering needs placeholder tensors and other entry points that are new in torch_xla 2.9. The warning lists what
torch_xla's bridge gets wrong.
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

# Option values that need none of our passes. For all other options, that is the default.
_NEUTRAL_VALUES: dict[str, object] = {"lowering": "stock", "precision": "float32", "checkpoint": "off", "fuse": False}


def compile_with_stock(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, version: str
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured with torch_xla's own backend.

    Args:
        gm: Dynamo's graph.
        inputs: Its inputs, on the XLA device.
        options: `lowering` must be "stock", and no other option may need our lowering or passes.
        version: The version of torch_xla, for messages.

    Raises:
        TPUConfigurationError: An option has no effect with this bridge.
        TPUDeviceError: Tensors are not on the XLA device, so this bridge would not compile them.
    """
    _require_stock_options(options, version)
    tensors = [x for x in [*gm.parameters(), *gm.buffers(), *inputs] if isinstance(x, torch.Tensor)]
    if tensors and placement_mode(tensors, default="xla") != "xla":
        raise TPUDeviceError(
            f"tensors are on the CPU, but the bridge of torch_xla {version} only compiles tensors on the XLA device. "
            f"Try: move model and inputs there with .to('xla'), or use torch_xla 2.9, which moves them for you: {CURE}"
        )
    _warn(version)
    with translate_errors():
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("openxla")(gm, list(inputs))
    return compiled


def _require_stock_options(options: CompileOptions, version: str) -> None:
    if options.lowering != "stock":
        raise TPUConfigurationError(
            f"lowering='openxla' needs torch_xla 2.9, but {version} is installed. Allowed: "
            f"options={{'lowering': 'stock'}}, torch_xla's own bridge, which is wrong in known cases. Try: {CURE}"
        )
    for option in option_fields():
        neutral = _NEUTRAL_VALUES.get(option.name, option.default)
        if option.name in options.given and (option.name == "level" or getattr(options, option.name) != neutral):
            raise TPUConfigurationError(
                f"option {option.name!r} has no effect with torch_xla {version}: lowering='stock' is torch_xla's own "
                f"bridge, without our passes and caches. Try: leave it out, or {CURE}"
            )


@functools.cache
def _warn(version: str) -> None:
    """Warn about torch_xla's known bugs, once per process."""
    known = "\n".join(f"* {limit.what} {limit.cure}" for limit in EARLIER_LIMITS)
    logger.warning(
        "torch_xla %s: lowering='stock' compiles with torch_xla's own bridge. Nothing is cast, fused or "
        "checkpointed, kp_dynamo.cache_stats() counts nothing, and the bridge has these known bugs:\n%s\nTry: %s",
        version,
        known,
        CURE,
    )
