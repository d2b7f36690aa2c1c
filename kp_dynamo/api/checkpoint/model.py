"""A model's tensors by name: which ones are tied, and how to load values of a file into them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.checkpoint.file import bytes_of
from kp_dynamo.api.environment import of_type
from kp_dynamo.exceptions import TPUCheckpointError

_NUM_SHOWN = 5
_COMPILED = "_orig_mod"  # where torch.compile keeps the module it wraps

# The dictionary in which a module holds a tensor, and the key there.
_Slot = tuple[dict[str, Any], str]
# A tensor of the model, and its value in the file.
_Copy = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ModelState:
    """The persistent parameters and buffers of a model.

    Attributes:
        tensors: By name, in `state_dict` order, without the name parts that `torch.compile` inserts.
        stored_as: Name -> the first name of the same memory, which is its name in the file.
        slots: Name -> where the model holds it.
    """

    tensors: dict[str, torch.Tensor]
    stored_as: dict[str, str]
    slots: dict[str, _Slot]


def read_model(given: object) -> ModelState:
    """The state of a model; raises TPUCheckpointError if part of it is not a dense tensor with values."""
    model = of_type(nn.Module, "model", given, TPUCheckpointError, "an nn.Module")
    slots = dict(_slots(model))
    tensors = {_plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, value in tensors.items():
        _require_dense(name, value, slots)
    first: dict[object, str] = {}
    stored_as = {name: first.setdefault(_memory(tensor), name) for name, tensor in tensors.items()}
    return ModelState(tensors, stored_as, slots)


def plan_write(
    state: ModelState, tensors: Mapping[str, torch.Tensor], stored_as: Mapping[str, str]
) -> Callable[[contextlib.ExitStack], None]:
    """The write of a load, checked: names, shapes, dtypes or ties that do not fit raise TPUCheckpointError.

    `tensors` are those of the file by stored name, which `stored_as` has for each name in the model. The write adds to
    its stack what restores the old values, and raises TPUCheckpointError if memory runs out.
    """
    _require_none(_misfits(state, tensors, stored_as))
    values = {name: tensors[stored_as[name]] for name in state.tensors}
    _require_none(
        f"{name!r} and {first!r} are one tensor in the model and differ in the file"
        for name, first in state.stored_as.items()
        if stored_as[name] != stored_as[first] and not _is_same(values[name], values[first])
    )
    ties = dict(_ties(state, stored_as))
    names = {id(target): name for name, target in state.tensors.items() if name not in ties}
    copies = {name: (state.tensors[name], values[name]) for name in names.values()}
    _require_none(_overwritten(copies))
    return partial(_write, list(copies.values()), [(state.slots[name], tensor) for name, tensor in ties.items()])


def _write(copies: list[_Copy], ties: list[tuple[_Slot, torch.Tensor]], undo: contextlib.ExitStack) -> None:
    """Write all values, then tie; undone in reverse order, because targets may share elements."""
    try:
        for target, value in copies:
            once, value_once = _without_repeats(target, value)
            with _writable(once):
                undo.callback(_restore, once, once.clone())
                once.copy_(value_once)
    except Exception as cause:
        raise TPUCheckpointError(f"the model could not be written to: {cause}. Nothing was changed.") from cause
    for (held, key), tensor in ties:
        undo.callback(held.__setitem__, key, held[key])
        held[key] = tensor


def _slots(model: nn.Module) -> Iterator[tuple[str, _Slot]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for key in held:
                yield _plain_name(f"{prefix}.{key}" if prefix else key), (held, key)


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _require_dense(name: str, value: Any, slots: Mapping[str, _Slot]) -> None:
    held, key = slots.get(name, ({}, name))
    if key not in held or held[key] is not value:
        raise TPUCheckpointError(
            f"{name!r} is state that a module creates in its own state_dict code (a {type(value).__qualname__}). "
            "Allowed: parameters and persistent buffers. Try: register it as a buffer."
        )
    if nn.parameter.is_lazy(value):
        raise TPUCheckpointError(f"{name!r} has no shape yet. Try: run the model once before saving or loading it.")
    if value.is_meta:
        raise TPUCheckpointError(f"{name!r} is on the meta device and has no values. Try: model.to_empty(device=...).")
    # Checked by class, because `.data` and `detach` create an alias, which misleads torch_xla's own bridge.
    is_plain = type(value) in (torch.Tensor, nn.Parameter)
    if value.layout is not torch.strided or value.is_quantized or not is_plain:
        raise TPUCheckpointError(
            f"{name!r} is a {type(value).__qualname__} of layout {value.layout}, dtype {value.dtype}. "
            "Allowed: plain dense tensors."
        )


def _memory(tensor: torch.Tensor) -> object:
    """A key that is equal for two tensors exactly if they have the same elements in memory."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _misfits(state: ModelState, tensors: Mapping[str, torch.Tensor], stored_as: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name!r} is missing in the file" for name in state.tensors if name not in stored_as)
    yield from (f"{name!r} is not in the model" for name in stored_as if name not in state.tensors)
    for name in state.tensors.keys() & stored_as.keys():
        own, value = state.tensors[name], tensors[stored_as[name]]
        if (own.shape, own.dtype) != (value.shape, value.dtype):
            yield f"{name!r} is {_described(value)} in the file and {_described(own)} in the model"


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _require_none(found: Iterable[str]) -> None:
    problems = list(found)
    if problems:
        more = f" and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise TPUCheckpointError(
            f"the file does not fit the model: {'; '.join(problems[:_NUM_SHOWN])}{more}. Nothing was changed. "
            "Try: build the model as it was when it was saved."
        )


def _ties(state: ModelState, stored_as: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names to tie again: two tensors now that were one when saved (`module.to("xla")` unties).

    Both must be of the same kind, on the same device and have the same `requires_grad`; otherwise each gets the values
    and they stay untied.
    """
    first: dict[str, torch.Tensor] = {}
    for name, tensor in state.tensors.items():
        other = first.setdefault(stored_as[name], tensor)
        kinds = {(isinstance(t, nn.Parameter), t.device, t.requires_grad) for t in (tensor, other)}
        if _memory(tensor) != _memory(other) and len(kinds) == 1:
            yield name, other


def _overwritten(copies: Mapping[str, _Copy]) -> Iterator[str]:
    """Values that the model cannot hold, because targets share or repeat elements; tried on a copy of these targets.

    XLA storages do not show aliasing.
    """
    on_cpu = {name: target.detach() for name, (target, _) in copies.items() if target.device.type != "xla"}
    num_targets = Counter(target.untyped_storage()._cdata for target in on_cpu.values())
    trial = copy.deepcopy(
        {n: t for n, t in on_cpu.items() if 0 in t.stride() or num_targets[t.untyped_storage()._cdata] > 1}
    )  # one copy of each storage
    for name, target in trial.items():
        once, value = _without_repeats(target, copies[name][1])
        with _writable(once):
            once.copy_(value)
    for name, target in trial.items():
        if not _is_same(target, copies[name][1]):
            cause = "is expanded in the model" if 0 in target.stride() else "shares elements with another tensor"
            yield f"{name!r} of shape {list(target.shape)} {cause}, and these elements differ in the file"


def _without_repeats(target: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without the repeated elements of an expanded target, which `copy_` refuses to write to.

    For XLA the value stays on the CPU: `copy_` then keeps the sharding of the target. From a value that is already on
    the device it takes the value's sharding instead (2.9.0).
    """
    if target.device.type == "xla" or 0 not in target.stride():
        return target, value
    once = tuple(slice(None) if stride else slice(1) for stride in target.stride())
    return target.detach()[once], value[once]


@contextlib.contextmanager
def _writable(target: torch.Tensor) -> Iterator[None]:
    """Inference tensors can be written only in inference mode; other tensors need their version bumped outside it."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        yield


def _restore(target: torch.Tensor, value: torch.Tensor) -> None:
    with _writable(target):
        target.copy_(value.cpu())  # through the CPU, see `_without_repeats`


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal to the bit."""
    return torch.equal(bytes_of(a), bytes_of(b))
