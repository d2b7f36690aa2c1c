"""A model's tensors by name: which ones are tied, and how to load values of a file into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.checkpoint.overlap import Copy, overwritten, same_bytes
from kp_dynamo.api.environment import of_type
from kp_dynamo.exceptions import TPUCheckpointError

_NUM_SHOWN = 5
_COMPILED = "_orig_mod"  # where torch.compile keeps the module it wraps

# The module that holds a tensor, the name of its dictionary there, and the key.
_Slot = tuple[nn.Module, str, str]


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

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The stored name of a tensor of the model; None for other tensors."""
        return next((self.stored_as[name] for name, own in self.tensors.items() if own is tensor), None)


@dataclass(frozen=True)
class ModelWrite:
    """The checked writes of a load, and the slots to tie; applying them can fail only by running out of memory."""

    copies: list[Copy]
    ties: list[tuple[_Slot, torch.Tensor]]

    def apply(self) -> None:
        """Write all values, or restore the old ones and raise TPUCheckpointError."""
        try:
            # In reverse order, because targets may share elements.
            with contextlib.ExitStack() as restoring:
                for target, value in self.copies:
                    with _writable(target):
                        restoring.callback(_restore, target, target.clone())
                        target.copy_(value)
                for (module, kind, key), tensor in self.ties:
                    held = getattr(module, kind)
                    restoring.callback(held.__setitem__, key, held[key])
                    held[key] = tensor
                restoring.pop_all()
        except Exception as cause:
            raise TPUCheckpointError(f"the model could not be written to: {cause}. Nothing was changed.") from cause


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


def plan_write(state: ModelState, tensors: Mapping[str, torch.Tensor], stored_as: Mapping[str, str]) -> ModelWrite:
    """Plan where to write the file's tensors; names, shapes, dtypes or ties that do not fit raise TPUCheckpointError.

    `tensors` are those of the file by stored name, which `stored_as` has for each name in the model.
    """
    _require_none(_misfits(state, tensors, stored_as))
    values = {name: tensors[stored_as[name]] for name in state.tensors}
    _require_none(
        f"{name!r} and {first!r} are one tensor in the model and differ in the file"
        for name, first in state.stored_as.items()
        if stored_as[name] != stored_as[first] and not same_bytes(values[name], values[first])
    )
    ties = list(_ties(state, stored_as))
    dropped = [slot for slot, _ in ties]
    targets = {id(target): name for name, target in state.tensors.items() if state.slots[name] not in dropped}
    names = list(targets.values())
    copies = [_staged(state.tensors[name], values[name]) for name in names]
    _require_none(
        f"{names[position]!r} shares elements with another tensor of the model, and the two differ in the file"
        for position in overwritten(copies)
    )
    return ModelWrite(copies, ties)


@contextlib.contextmanager
def _writable(target: torch.Tensor) -> Iterator[None]:
    """Inference tensors can be written only in inference mode; other tensors need their version bumped outside it."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        yield


def _restore(target: torch.Tensor, value: torch.Tensor) -> None:
    with _writable(target):
        target.copy_(value.cpu())  # through the CPU, see `_staged`


def _slots(model: nn.Module) -> Iterator[tuple[str, _Slot]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for key in getattr(module, kind):
                yield _plain_name(f"{prefix}.{key}" if prefix else key), (module, kind, key)


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _require_dense(name: str, value: Any, slots: Mapping[str, _Slot]) -> None:
    module, kind, key = slots.get(name, (None, "", ""))
    if module is None or getattr(module, kind)[key] is not value:
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


def _require_none(found: Iterator[str]) -> None:
    problems = list(found)
    if problems:
        more = f" and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise TPUCheckpointError(
            f"the file does not fit the model: {'; '.join(problems[:_NUM_SHOWN])}{more}. Nothing was changed. "
            "Try: build the model as it was when it was saved."
        )


def _ties(state: ModelState, stored_as: Mapping[str, str]) -> Iterator[tuple[_Slot, torch.Tensor]]:
    """Slots to tie again: two tensors now that were one when saved (`module.to("xla")` unties).

    Both must be of the same kind, on the same device and have the same `requires_grad`; otherwise each gets the values
    and they stay untied.
    """
    first: dict[str, str] = {}
    for name, tensor in state.tensors.items():
        kept = first.setdefault(stored_as[name], name)
        other = state.tensors[kept]
        is_alike = (tensor.device, tensor.requires_grad) == (other.device, other.requires_grad)
        is_of_one_kind = state.slots[name][1] == state.slots[kept][1]
        if is_alike and is_of_one_kind and _memory(tensor) != _memory(other):
            yield state.slots[name], other


def _staged(target: torch.Tensor, value: torch.Tensor) -> Copy:
    """Target and value, ready for `copy_`: without the repeated elements of an expanded view.

    For XLA the value stays on the CPU: `copy_` then keeps the sharding of the target. From a value that is already on
    the device it takes the value's sharding instead (2.9.0).
    """
    repeated = [i for i, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)) if not stride]
    if target.device.type == "xla" or not any(target.shape[i] > 1 for i in repeated):
        return target, value
    once = value
    for i in repeated:
        once = once.narrow(i, 0, min(1, value.shape[i]))
    if not same_bytes(once.expand_as(value), value):
        raise TPUCheckpointError(
            f"a tensor of shape {list(target.shape)} is expanded in the model, but its elements differ in the file"
        )
    return target.detach().as_strided(once.shape, target.stride()), once.to(target.device)
