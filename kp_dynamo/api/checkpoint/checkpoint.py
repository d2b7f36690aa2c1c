"""Save and load a model and its optimizer in one safetensors file, which is written atomically and never unpickled.

The file holds each tensor of the model under its name (tied tensors once), the optimizer's tensors as
`optimizer.state.<i>.<name>`, and everything else as JSON in the metadata. Other programs can read the tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kp_dynamo.api.checkpoint.file import DIGEST, FORMAT, Path, read_file, write_file
from kp_dynamo.api.checkpoint.model import plan_write, read_model
from kp_dynamo.api.checkpoint.optimizer import describe, load, require_fit
from kp_dynamo.api.checkpoint.values import Encoder, decode
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import version_of
from kp_dynamo.exceptions import TPUCheckpointError
from kp_dynamo.lowering.pending import run_pending

_PREFIX = "kp_tpu."
_VERSIONS_OF = ("kp_dynamo", "torch", "torch_xla", "safetensors")


@dataclass(frozen=True)
class CheckpointInfo:
    """What `save_checkpoint` was given, and the versions of the packages that wrote the file ("": not installed)."""

    step: int | None
    config: Any
    versions: dict[str, str]


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer | None = None, *, config: Any = None, step: int | None = None
) -> None:
    """Save a model, and its optimizer's state if one is given; tensors on a device are copied to the CPU.

    The write is atomic: `path` always holds the old file or the new one, even after a power cut. Do not modify the
    model until this returns.

    Args:
        path: A file name in an existing folder.
        model: A module, compiled by `torch.compile` or not; names are those of the uncompiled module.
        optimizer: None omits its state.
        config: Plain values, or an object whose `to_dict()` returns them.
        step: The training step, from 0.

    Raises:
        TPUCheckpointError: Some state cannot be stored, or the file cannot be written.
    """
    state, plain = read_model(model), Encoder()
    about: dict[str, Any] = {
        "versions": {name: version_of(name) for name in _VERSIONS_OF},
        "config": _plain_config(config),
        "step": _checked_step(step),
        "model": state.stored_as,
    }
    if optimizer is not None:
        about["optimizer"] = describe(optimizer, state)
        about["optimizer_state"] = plain.encode(optimizer.state_dict(), "optimizer")
    stored = {name: tensor for name, tensor in state.tensors.items() if state.stored_as[name] == name}
    if twice := sorted(stored.keys() & plain.tensors.keys()):
        raise TPUCheckpointError(f"model and optimizer both have a tensor {twice[0]!r}. Try: rename the module.")
    metadata = {f"{_PREFIX}{name}": json.dumps(value, allow_nan=False) for name, value in about.items()}
    # Other readers of the format expect "pt".
    write_file(path, _on_cpu({**stored, **plain.tensors}), {"format": "pt", **metadata})


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> CheckpointInfo:
    """Load a file of `save_checkpoint` into `model` and `optimizer`, on their current devices.

    Everything is checked before the first write: names, shapes, dtypes, and the optimizer's class, groups and
    parameters. Tensors that were tied when they were saved are tied again.

    Raises:
        TPUCheckpointError: The file is torn, truncated, altered, foreign, or does not fit; model and optimizer are
            unchanged.
    """
    tensors, metadata = read_file(path)
    state = read_model(model)
    try:
        ours = {name for name in metadata if name.startswith(_PREFIX)} - {FORMAT, DIGEST}
        about = {name.removeprefix(_PREFIX): json.loads(metadata[name]) for name in ours}
        info = CheckpointInfo(_checked_step(about["step"]), decode(about["config"], {}), about["versions"])
        write = plan_write(state, tensors, about["model"])
        if optimizer is not None:
            optimizer_state = _optimizer_state(describe(optimizer, state), about, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as cause:
        raise TPUCheckpointError(
            f"{os.fspath(path)!r} is intact, but neither save_checkpoint nor TPUBackend.save_model wrote its metadata "
            f"({type(cause).__name__}: {cause}). Nothing was changed."
        ) from cause
    with contextlib.ExitStack() as undo:
        if optimizer is not None:
            load(optimizer, optimizer_state, undo)
        write(undo)
        undo.pop_all()
    return info


def _optimizer_state(given: dict[str, Any], about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state in the file, if it is one of the optimizer that `given` describes."""
    if "optimizer" not in about:
        raise TPUCheckpointError(
            "the file has no optimizer state. Nothing was changed. Try: save with an optimizer, or load only the model."
        )
    require_fit(about["optimizer"], given)
    of_model = set(about["model"].values())
    # The tensors are memory-mapped from the file, and an optimizer keeps the tensors that it receives.
    mine = {name: tensor.clone() for name, tensor in tensors.items() if name not in of_model}
    return decode(about["optimizer_state"], mine)


def _plain_config(config: Any) -> Any:
    plain = Encoder()
    encoded = plain.encode(config.to_dict() if hasattr(config, "to_dict") else config, "config")
    if plain.tensors:
        raise TPUCheckpointError(f"{next(iter(plain.tensors))} is a tensor. Allowed: a config of plain values.")
    return encoded


def _checked_step(step: object) -> int | None:
    if step is None or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
        return step
    raise TPUCheckpointError(f"step={step!r} is invalid. Allowed: an int >= 0, None.")


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values on the CPU, detached; tensors on the XLA device are copied in one transfer."""
    there = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
    run_pending([tensors[name] for name in there])
    fetched = dict(zip(there, xla.fetch([tensors[name] for name in there]), strict=True)) if there else {}
    return {name: (fetched[name] if name in fetched else t.detach().cpu()) for name, t in tensors.items()}
