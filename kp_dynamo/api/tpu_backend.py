"""`TPUBackend`: the device, models and data on it, and files of them."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.api.environment import whole_config
from kp_dynamo.api.models import checked_model, move
from kp_dynamo.api.xla_compiler import XLACompiler
from kp_dynamo.api.xla_device_manager import XLADeviceManager
from kp_dynamo.backend import cache_stats, clear_cache
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import KernelPyTorchConfig
from kp_dynamo.exceptions import TPUCheckpointError, TPUDeviceError


class TPUBackend:
    """The XLA device of this process: XLA's CPU device where there is no TPU.

    Args:
        config: None for the defaults.

    Raises:
        TPUNotAvailableError: The configuration switches the TPU off, or torch_xla is missing.
        TPUDeviceError: The device cannot be started.
        TPUConfigurationError: No configuration, or flags that come too late.
        TPUDistributedError: The devices are not those that the configuration asks for.
    """

    def __init__(self, config: KernelPyTorchConfig | None = None) -> None:
        self.config = whole_config(config)
        self._devices = XLADeviceManager(self.config.hardware.tpu)
        self.compiler = XLACompiler(self.config.hardware.tpu)

    @property
    def device(self) -> torch.device:
        """The XLA device."""
        return self._devices.device

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self._devices.world_size

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self._devices.rank

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    @property
    def device_count(self) -> int:
        """XLA devices; one of them is used, under SPMD all."""
        return self._devices.num_devices

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move `model` onto the device, in place; parameters that were tied stay tied.

        Its parameters are new objects: make optimizers afterwards.

        Raises:
            TPUModelPreparationError: It is no module, or cannot be moved.
        """
        checked_model(model)
        return move(model, self.device)

    def prepare_data(self, data: Any) -> Any:
        """A copy of `data` (a tensor, or dicts, lists and tuples of them, nested) with its tensors on the device.

        Raises:
            TPUDeviceError: There is no tensor in it.
        """
        leaves = pytree.tree_leaves(data)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
            raise TPUDeviceError(
                f"there is no tensor in the data, but {kinds}. Allowed: a tensor, or dicts, lists and tuples of "
                "tensors; make tensors of arrays with torch.as_tensor, a dict of other mappings with dict(data)."
            )
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), data)

    def optimize_for_inference(self, model: nn.Module, sample_inputs: Any = None) -> nn.Module:
        """`model` on the device, in evaluation mode, compiled; see `XLACompiler.optimize_for_inference`."""
        return self.compiler.optimize_for_inference(self.prepare_model(model), sample_inputs)

    def optimize_for_training(self, model: nn.Module, sample_inputs: Any = None) -> nn.Module:
        """`model` on the device, in training mode, compiled; see `XLACompiler.optimize_for_training`."""
        return self.compiler.optimize_for_training(self.prepare_model(model), sample_inputs)

    def synchronize(self) -> None:
        """Run what is pending on the device, and wait until it is done."""
        xla.synchronize()

    def get_memory_stats(self) -> dict[str, Any]:
        """Of the device, the compiled models and the programs.

        "device_memory" is what XLA counts, in bytes; None where the device does not count, as XLA's CPU device.
        """
        return {
            "device": str(self.device),
            "world_size": self.world_size,
            "rank": self.rank,
            "device_count": self.device_count,
            "device_memory": xla.memory_info(),
            "model_cache_stats": self.compiler.get_compilation_stats()["compilation_cache"],
            "program_cache_stats": cache_stats(),
        }

    def clear_cache(self) -> None:
        """Forget compiled models, and all programs and copies of the process; what is in use compiles again."""
        self.compiler.clear_cache()
        clear_cache()

    def save_model(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        save_optimizer: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Write the model, and the state of `optimizer` if one is given, into one file.

        `save_optimizer` says that there must be one.

        Raises:
            TPUCheckpointError: It cannot be written, or there is no optimizer to save.
        """
        chosen = _optimizer("save", save_optimizer, optimizer)
        self.synchronize()
        _checkpoint().save_checkpoint(path, checked_model(model), chosen, config=self.config.to_dict())

    def load_model(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        load_optimizer: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        """Read a file of `save_model` into `model`, and into `optimizer` if one is given; returns `model`.

        `load_optimizer` says that there must be one.

        Raises:
            TPUCheckpointError: It cannot be read or is not whole; model and optimizer are as they were.
        """
        _checkpoint().load_checkpoint(path, checked_model(model), _optimizer("load", load_optimizer, optimizer))
        return model


def _checkpoint() -> Any:
    return import_module("kp_dynamo.api.checkpoint.checkpoint")


def _optimizer(verb: str, is_wanted: bool, optimizer: Any) -> torch.optim.Optimizer | None:
    if not is_wanted and optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        asked = f"{verb}_optimizer=True, but " if is_wanted else ""
        raise TPUCheckpointError(
            f"{asked}optimizer is {type(optimizer).__name__}; give the torch.optim.Optimizer that trains the model, or "
            f"leave optimizer and {verb}_optimizer out"
        )
    return optimizer
