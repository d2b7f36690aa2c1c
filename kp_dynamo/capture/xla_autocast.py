"""XLA's rules of autocast on the CPU, where the graphs of XLA tensors are traced.

Autocast casts by the rules of the tensors' device. Those of the CPU and of XLA differ: XLA computes softmax in float32,
the CPU in what it is given. Dynamo has recorded XLA's dtypes, and constants that depend on them: the least number of
float32 is minus infinity in bfloat16.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kp_dynamo.compat.autocast_attention import cast_by_autocast

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast

_Rule = Callable[[], torch.dtype | None]
"""The dtype of the floating-point operands; None: they stay as they are."""


def _as_given() -> None:
    return None


def _float32() -> torch.dtype:
    return torch.float32


def _narrow() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


# For each rule of XLA and of the CPU, the operators for which they differ in torch 2.9 and torch_xla 2.9 (its
# csrc/autocast_mode.cpp). Left out are those that XLA would get in bfloat16 and cannot compute in it: FFT, linear
# algebra, quantiles.
_DIFFERENT: dict[tuple[_Rule, _Rule], tuple[str, ...]] = {
    (_float32, _as_given): (
        "_softmax", "softmax.int", "softmax.Dimname", "log_softmax.int", "log_softmax.Dimname", "batch_norm",
        "pow.Tensor_Scalar",
    ),
    (_narrow, _as_given): ("max_pool2d", "relu"),
    (_narrow, _narrow): ("einsum",),  # as the matmuls inside of it, which the CPU's rules name
    (_as_given, _float32): (
        "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "max_pool3d", "fractional_max_pool2d",
        "fractional_max_pool3d", "max_unpool2d", "max_unpool3d", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d",
        "huber_loss", "poisson_nll_loss",
    ),
    (_as_given, _narrow): ("linalg_vecdot",),
}  # fmt: skip

_lock = threading.Lock()
_state = threading.local()


def has_autocast(gm: fx.GraphModule) -> bool:
    """Whether autocast is on around a graph, or in it."""
    if any(map(torch.is_autocast_enabled, ("cpu", "xla"))):
        return True
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target is ENTER_AUTOCAST for graph in graphs for node in graph.nodes)


@contextlib.contextmanager
def rules_of_xla() -> Iterator[None]:
    """In this thread, let the CPU's autocast follow XLA's rules.

    The kernels are there for all threads meanwhile; in the others they follow the rules of the CPU.
    """
    if getattr(_state, "is_xla", False):
        yield
        return
    with _lock:
        library = torch.library.Library("aten", "IMPL")
        for rules, names in _DIFFERENT.items():
            for name in names:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, partial(_called, operator, *rules), "AutocastCPU", allow_override=True)
        _state.is_xla = True
        try:
            yield
        finally:
            _state.is_xla = False
            library._destroy()


def _called(operator: torch._ops.OpOverload, of_xla: _Rule, of_cpu: _Rule, *args: Any, **kwargs: Any) -> Any:
    dtype = (of_xla if getattr(_state, "is_xla", False) else of_cpu)()
    if dtype is not None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, partial(cast_by_autocast, dtype=dtype), (args, kwargs))
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)
