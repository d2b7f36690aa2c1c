"""An optimizer's state: what it must match, and how to restore it exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.api.checkpoint.model import ModelState
from kp_dynamo.exceptions import TPUCheckpointError


def describe(optimizer: object, model: ModelState) -> dict[str, Any]:
    """The identity of an optimizer: its class, and for each group its parameters with their names in the model.

    Raises:
        TPUCheckpointError: It is not a torch optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TPUCheckpointError(
            f"optimizer of type {type(optimizer).__qualname__} is invalid. Allowed: a torch.optim.Optimizer."
        )
    groups = [[[model.name_of(p), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def require_fit(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise if two descriptions differ.

    Raises:
        TPUCheckpointError: The optimizer class, the parameters or their order differ.
    """
    if saved["class"] != given["class"]:
        _refuse(f"it was saved from {saved['class']}, but the given optimizer is {given['class']}")
    sizes = [[len(group) for group in which["groups"]] for which in (saved, given)]
    if sizes[0] != sizes[1]:
        _refuse(f"its groups have {sizes[0]} parameters, but the given groups have {sizes[1]}")
    for number, groups in enumerate(zip(saved["groups"], given["groups"], strict=True)):
        for was, now in zip(*groups, strict=True):
            if was != now:
                _refuse(f"group {number} has {_named(was)} where the given one has {_named(now)}")


def _named(parameter: list[Any]) -> str:
    name, shape = parameter
    return f"{name or 'a parameter outside the model'} of shape {shape}"


def _refuse(why: str) -> None:
    raise TPUCheckpointError(
        f"the file's optimizer state does not fit: {why}. Nothing was changed. Try: create the optimizer as it was "
        "when it was saved, or load only the model."
    )


class OptimizerWrite:
    """Loads a state into an optimizer, and can restore the old one."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._optimizer, self._new = optimizer, state
        self._old = (optimizer.state, optimizer.param_groups)

    def apply(self) -> None:
        """Load the state, each tensor in the dtype that was saved.

        Raises:
            TPUCheckpointError: The optimizer rejects it; the optimizer is unchanged.
        """
        try:
            self._optimizer.load_state_dict(self._new)
            self._keep_dtypes()
        except Exception as cause:
            self.undo()
            raise TPUCheckpointError(
                f"{type(self._optimizer).__name__} rejects its state: {cause}. Nothing was changed."
            ) from cause

    def undo(self) -> None:
        """Restore the old state; loading replaced it and did not write to its tensors."""
        self._optimizer.state, self._optimizer.param_groups = self._old

    def _keep_dtypes(self) -> None:
        """Restore saved dtypes: torch casts state to the parameter's dtype, so float32 moments may become bfloat16."""
        ordered = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [n for group in self._new["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, ordered, strict=True):
            if parameter in self._optimizer.state:
                self._optimizer.state[parameter] = pytree.tree_map(
                    _in_saved_dtype, self._optimizer.state[parameter], self._new["state"].get(number, {})
                )


def _in_saved_dtype(own: Any, saved: Any) -> Any:
    if not isinstance(saved, torch.Tensor):
        return saved  # torch turns a string into a generator
    return saved.to(own.device) if own.dtype != saved.dtype else own
