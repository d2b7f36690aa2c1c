"""The parts of a key besides the graph: the inputs of a call, torch's modes, versions and flags."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from kp_dynamo.compat import chips
from kp_dynamo.compat.versions import version_of


class InputPart(NamedTuple):
    """The properties of a graph input that compilation may depend on."""

    dtype: str
    shape: tuple[object, ...]
    stride: tuple[object, ...]
    requires_grad: bool
    is_leaf: bool
    device: str
    layout: str
    type: str
    storage_group: int
    storage_offset: object
    flags: tuple[bool, bool, bool]


def input_parts(inputs: Sequence[Any]) -> tuple[object, ...]:
    """An `InputPart` per tensor; inputs that share a storage have the same group number."""
    groups: dict[object, int] = {}
    return tuple(_input_part(x, groups) for x in inputs)


def _input_part(value: Any, groups: dict[object, int]) -> object:
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    strided = value.layout is torch.strided
    return InputPart(
        str(value.dtype),
        tuple(value.shape),
        value.stride() if strided else (),
        value.requires_grad,
        value.is_leaf,
        value.device.type,
        str(value.layout),
        type(value).__name__,
        groups.setdefault(_storage_of(value), len(groups)),
        value.storage_offset() if strided else 0,
        (value.is_conj(), value.is_neg(), value.is_inference()),
    )


def _storage_of(tensor: torch.Tensor) -> object:
    # XLA tensors do not expose which storage they share.
    is_known = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage()._cdata if is_known else ("tensor", id(tensor))


def shares_storage(inputs: Sequence[Any]) -> bool:
    """Whether two inputs are the same tensor or share a storage."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return len({_storage_of(t) for t in tensors}) < len(tensors)


def mode_parts() -> tuple[tuple[str, object], ...]:
    """Process and thread state that changes the meaning of a graph or how AOTAutograd treats it."""
    from torch._functorch import config as functorch_config

    autocast = tuple(
        (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))) for device in ("cpu", "xla")
    )
    return (
        ("grad", torch.is_grad_enabled()),
        ("inference", torch.is_inference_mode_enabled()),
        ("autocast", (*autocast, torch.is_autocast_cache_enabled())),
        ("saved tensor hooks", torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
        ("functorch level", str(torch._C._functorch.maybe_current_level())),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("default dtype", str(torch.get_default_dtype())),
        ("functorch config", functorch_config.get_hash().hex()),
    )


@cache
def environment_parts() -> tuple[tuple[str, object], ...]:
    """State that is fixed for this process once the XLA client has started."""
    names = ("torch", "torch_xla", "libtpu", "kp_dynamo")
    flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_USE_SPMD", "XLA_USE_BF16", "XLA_DOWNCAST_BF16")
    return (
        ("versions", tuple((name, version_of(name)) for name in names)),
        ("device kind", chips.device_kind()),
        ("flags", tuple((name, os.environ.get(name, "")) for name in flags)),
    )
