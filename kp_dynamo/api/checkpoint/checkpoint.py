"""A model, and its optimizer, in one safetensors file: written whole or not at all, never unpickled.

The file holds each of the model's tensors under its name (tied ones once), the optimizer's as
`optimizer.state.<i>.<name>`, and in its metadata what is no tensor, as JSON. Other programs can read the tensors.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.checkpoint.file import read_file, write_file
from kp_dynamo.api.checkpoint.model import plan_write, read_model
from kp_dynamo.api.checkpoint.optimizer import OptimizerWrite, describe, require_fit
from kp_dynamo.api.checkpoint.values import Encoder, decode
from kp_dynamo.compat import xla
from kp_dynamo.exceptions import TPUCheckpointError
from kp_dynamo.lowering.pending import run_pending

_PREFIX = "kp_tpu."
_VERSIONS_OF = ("kp_dynamo", "torch", "torch_xla", "safetensors")
_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class CheckpointInfo:
    """What a file says about itself.

    Attributes:
        step: As it was given to `save_checkpoint`.
        config: As it was given, as plain values.
        versions: Of the packages that wrote it; "" for one that was not installed.
    """

    step: int | None
    config: Any
    versions: dict[str, str]


def save_checkpoint(
    path: _Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    config: Any = None,
    step: int | None = None,
) -> None:
    """Save a model, and its optimizer's state if one is given; tensors on a device come to the CPU.

    Whatever happens meanwhile, a power cut included, `path` holds the old file or the new one. Nothing may write to
    the model until it returns.

    Args:
        path: Any name in a folder that exists.
        model: Compiled by `torch.compile` or not; the names are those of the module itself.
        optimizer: None leaves its state out.
        config: Plain values, or an object whose `to_dict()` gives them.
        step: Of training, from 0.

    Raises:
        TPUCheckpointError: Something cannot be stored, or the file cannot be written.
    """
    state, plain = read_model(model), Encoder()
    about: dict[str, Any] = {
        "versions": {name: _version(name) for name in _VERSIONS_OF},
        "config": _plain_config(config),
        "step": _checked_step(step),
        "model": state.stored_as,
    }
    if optimizer is not None:
        about["optimizer"] = describe(optimizer, state)
        about["optimizer_state"] = plain.encode(optimizer.state_dict(), "optimizer")
    stored = {name: tensor for name, tensor in state.tensors.items() if state.stored_as[name] == name}
    if twice := sorted(stored.keys() & plain.tensors.keys()):
        raise TPUCheckpointError(f"the model has a tensor called {twice[0]!r}, as the optimizer has; rename its module")
    metadata = {f"{_PREFIX}{name}": json.dumps(value, allow_nan=False) for name, value in about.items()}
    # "pt" is what other readers of the format look for.
    write_file(path, _on_cpu({**stored, **plain.tensors}), {"format": "pt", **metadata})


def load_checkpoint(path: _Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> CheckpointInfo:
    """Load what `save_checkpoint` saved, onto the devices where model and optimizer are.

    All is checked before the first write: names, shapes, dtypes, the optimizer's class, groups and parameters. What
    was tied when it was saved is tied again.

    Raises:
        TPUCheckpointError: The file is torn, truncated, altered, foreign, or does not fit; model and optimizer are as
            they were.
    """
    tensors, metadata = read_file(path)
    state = read_model(model)
    try:
        about = {name.removeprefix(_PREFIX): json.loads(text) for name, text in metadata.items() if _is_json(name)}
        info = CheckpointInfo(_checked_step(about["step"]), decode(about["config"], {}), about["versions"])
        write = plan_write(state, tensors, about["model"])
        load = None if optimizer is None else _plan_optimizer(optimizer, describe(optimizer, state), about, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} is whole, and its metadata says what save_checkpoint never wrote "
            f"({type(cause).__name__}: {cause}). Nothing was changed."
        ) from cause
    try:
        if load is not None:
            load.apply()
        write.apply()
    except BaseException:
        if load is not None:
            load.undo()
        raise
    return info


def _plan_optimizer(
    optimizer: torch.optim.Optimizer,
    given: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> OptimizerWrite:
    if "optimizer" not in about:
        raise TPUCheckpointError(
            "the file holds no optimizer state; save with an optimizer, or load the model alone. Nothing was changed."
        )
    require_fit(about["optimizer"], given)
    of_model = set(about["model"].values())
    # The file's own tensors are mapped from it, and an optimizer keeps those that it is given.
    mine = {name: tensor.clone() for name, tensor in tensors.items() if name not in of_model}
    return OptimizerWrite(optimizer, decode(about["optimizer_state"], mine))


def _is_json(name: str) -> bool:
    return name.startswith(_PREFIX) and name not in (f"{_PREFIX}format", f"{_PREFIX}digest")


def _plain_config(config: Any) -> Any:
    plain = Encoder()
    encoded = plain.encode(config.to_dict() if hasattr(config, "to_dict") else config, "config")
    if plain.tensors:
        raise TPUCheckpointError(f"{next(iter(plain.tensors))} is a tensor; a config holds plain values")
    return encoded


def _checked_step(step: object) -> int | None:
    if step is None or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
        return step
    raise TPUCheckpointError(f"step is {step!r}; allowed: an int >= 0, None")


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values on the CPU, without autograd; those on the XLA device come in one transfer."""
    there = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
    run_pending([tensors[name] for name in there])
    fetched = dict(zip(there, xla.fetch([tensors[name] for name in there]), strict=True)) if there else {}
    return {name: (fetched[name] if name in fetched else t.detach().cpu()) for name, t in tensors.items()}


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
