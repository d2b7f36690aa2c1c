"""An optimizer's state: what it must fit, and how it comes back exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.api.checkpoint.model import ModelState
from kp_dynamo.exceptions import TPUCheckpointError


def describe(optimizer: object, model: ModelState) -> dict[str, Any]:
    """What a state belongs to: the class, and of each group the parameters with their names in the model.

    Raises:
        TPUCheckpointError: It is no torch optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TPUCheckpointError(f"the optimizer is a {type(optimizer).__qualname__}; give a torch.optim.Optimizer")
    groups = [[[model.name_of(p), list(p.shape)] for p in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def require_fit(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Compare two descriptions.

    Raises:
        TPUCheckpointError: The state was another optimizer's, or is of other parameters, or in another order.
    """
    if saved["class"] != given["class"]:
        _refuse(f"it is of {saved['class']}, and {given['class']} was given")
    sizes = [[len(group) for group in which["groups"]] for which in (saved, given)]
    if sizes[0] != sizes[1]:
        _refuse(f"its groups have {sizes[0]} parameters, and those given have {sizes[1]}")
    for number, groups in enumerate(zip(saved["groups"], given["groups"], strict=True)):
        for was, now in zip(*groups, strict=True):
            if was != now:
                _refuse(f"group {number} has {_named(was)} where the one given has {_named(now)}")


def _named(parameter: list[Any]) -> str:
    name, shape = parameter
    return f"{name or 'a parameter outside the model'} of shape {shape}"


def _refuse(why: str) -> None:
    raise TPUCheckpointError(
        f"the file's optimizer state does not fit: {why}. Nothing was changed. Make the optimizer as it was when it "
        "was saved, or load the model alone."
    )


class OptimizerWrite:
    """Gives an optimizer a state, and the old one back if asked."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._optimizer, self._new = optimizer, state
        self._old = (optimizer.state, optimizer.param_groups)

    def apply(self) -> None:
        """Load the state, each tensor in the dtype that was saved.

        Raises:
            TPUCheckpointError: The optimizer refuses it; it is as it was.
        """
        try:
            self._optimizer.load_state_dict(self._new)
            self._keep_dtypes()
        except Exception as cause:
            self.undo()
            raise TPUCheckpointError(
                f"{type(self._optimizer).__name__} refuses its state: {cause}. Nothing was changed."
            ) from cause

    def undo(self) -> None:
        """The state from before; loading replaces it as a whole and does not write to its tensors."""
        self._optimizer.state, self._optimizer.param_groups = self._old

    def _keep_dtypes(self) -> None:
        """torch casts state to the dtype of its parameter: float32 moments of bfloat16 parameters lose their bits."""
        ordered = [p for group in self._optimizer.param_groups for p in group["params"]]
        numbers = [n for group in self._new["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, ordered, strict=True):
            if parameter in self._optimizer.state:
                self._optimizer.state[parameter] = pytree.tree_map(
                    _in_saved_dtype, self._optimizer.state[parameter], self._new["state"].get(number, {})
                )


def _in_saved_dtype(own: Any, saved: Any) -> Any:
    if not isinstance(saved, torch.Tensor):
        return saved  # of a text torch makes the name of a generator
    return saved.to(own.device) if own.dtype != saved.dtype else own
