"""An optimizer's state: what it must match, and how to restore it exactly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.api.checkpoint.model import ModelState
from kp_dynamo.api.environment import of_type
from kp_dynamo.exceptions import TPUCheckpointError


def describe(given: object, model: ModelState) -> dict[str, Any]:
    """The identity of an optimizer: its class, and for each group its parameters with their names in the model."""
    optimizer = of_type(torch.optim.Optimizer, "optimizer", given, TPUCheckpointError, "a torch.optim.Optimizer")
    names = {id(tensor): model.stored_as[name] for name, tensor in model.tensors.items()}
    groups = [[[names.get(id(p)), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def require_fit(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise a TPUCheckpointError if two descriptions differ: in the class, the parameters or their order."""
    for was, now in zip_longest(_lines(saved), _lines(given), fillvalue="nothing"):
        if was != now:
            raise TPUCheckpointError(
                f"the file's optimizer state does not fit: the file has {was} where the given optimizer has {now}. "
                "Nothing was changed. Try: create the optimizer as it was when it was saved, or load only the model."
            )


def _lines(described: dict[str, Any]) -> Iterator[str]:
    yield f"the class {described['class']}"
    yield f"groups of {[len(group) for group in described['groups']]} parameters"
    for number, group in enumerate(described["groups"]):
        for name, shape in group:
            yield f"{name or 'a parameter outside the model'} of shape {shape} in group {number}"


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Load `state`, each tensor in the dtype that was saved; `undo` puts the old state back."""
    # Loading replaces both and does not write to their tensors.
    undo.callback(setattr, optimizer, "state", optimizer.state)
    undo.callback(setattr, optimizer, "param_groups", optimizer.param_groups)
    try:
        optimizer.load_state_dict(state)
        _restore(optimizer, state)
    except Exception as cause:
        raise TPUCheckpointError(
            f"{type(optimizer).__name__} rejects its state: {cause}. Nothing was changed."
        ) from cause


def _restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore saved dtypes, and divide each state over the devices as its parameter.

    torch casts state to the parameter's dtype, so float32 moments may become bfloat16, and sends it to the device
    whole.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter in optimizer.state:
            state, restored = optimizer.state[parameter], partial(_restored, parameter)
            optimizer.state[parameter] = pytree.tree_map(restored, state, saved["state"].get(number, {}))


def _restored(parameter: torch.Tensor, own: Any, saved: Any) -> Any:
    if not isinstance(saved, torch.Tensor):
        return saved  # torch turns a string into a generator
    if own.device == parameter.device and own.shape == parameter.shape and _is_on_several_devices(parameter):
        from kp_dynamo.lowering import tensor_shardings

        return tensor_shardings.divided_like(parameter, saved.to(own.device))
    return saved.to(own.device) if own.dtype != saved.dtype else own


def _is_on_several_devices(parameter: torch.Tensor) -> bool:
    """Whether it lies on several; it is computed if it is pending."""
    if parameter.device.type != "xla":
        return False  # loading on the CPU needs no torch_xla
    from kp_dynamo.lowering import pending, spmd, tensor_shardings

    if not spmd.is_spmd():
        return False
    pending.run_pending([parameter])
    return not tensor_shardings.is_whole(parameter)
