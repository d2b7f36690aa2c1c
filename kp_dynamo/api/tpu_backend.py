"""`TPUBackend`: the device, models and data on it, and checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from kp_dynamo.api.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from kp_dynamo.api.checkpoint.file import Path
from kp_dynamo.api.environment import of_type, start_device
from kp_dynamo.api.models import checked_model, move, move_data
from kp_dynamo.api.xla_compiler import XLACompiler
from kp_dynamo.api.xla_device_manager import ProcessDevices
from kp_dynamo.backend import clear_cache
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import KernelPyTorchConfig
from kp_dynamo.exceptions import TPUCheckpointError, TPUConfigurationError, TPUDeviceError


class TPUBackend(ProcessDevices):
    """The XLA device of this process; XLA's CPU device if there is no TPU.

    Raises:
        TPUConfigurationError: `config` has another type, or its flags come after the client has started.
        TPUBackendError: The device cannot be used as configured, see `start_device`.
    """

    def __init__(self, config: KernelPyTorchConfig | None = None) -> None:
        chosen = KernelPyTorchConfig() if config is None else config
        self._config = of_type(KernelPyTorchConfig, "config", chosen, TPUConfigurationError, "a KernelPyTorchConfig")
        start_device(self.config.hardware.tpu)
        self.compiler = XLACompiler.following(self.config)

    device_count = ProcessDevices.num_devices

    @property
    def config(self) -> KernelPyTorchConfig:
        """The configuration; changes take effect at the next call."""
        return self._config

    @config.setter
    def config(self, value: KernelPyTorchConfig) -> None:
        checked = of_type(KernelPyTorchConfig, "config", value, TPUConfigurationError, "a KernelPyTorchConfig")
        self.compiler.follow(checked)
        self._config = checked

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Move `model` onto the device, in place; tied parameters stay tied.

        Its parameters are new objects: create optimizers afterwards.

        Raises:
            TPUModelPreparationError: It is not a module, or cannot be moved.
        """
        checked_model(model)
        return move(model, self.device)

    def prepare_data(self, data: Any) -> Any:
        """A copy of `data` (a tensor, or nested dicts, lists and tuples of them) with its tensors on the device.

        Raises:
            TPUDeviceError: It contains no tensor.
        """
        return move_data(data, self.device, TPUDeviceError)

    def optimize_for_inference(self, model: nn.Module, sample_inputs: Any = None) -> nn.Module:
        """`prepare_model`, and `XLACompiler.optimize_for_inference`."""
        return self.compiler.optimize_for_inference(self.prepare_model(model), sample_inputs)

    def optimize_for_training(self, model: nn.Module, sample_inputs: Any = None) -> nn.Module:
        """`prepare_model`, and `XLACompiler.optimize_for_training`."""
        return self.compiler.optimize_for_training(self.prepare_model(model), sample_inputs)

    def synchronize(self) -> None:
        """Run all pending operations of the device and wait for them."""
        xla.synchronize()

    def get_memory_stats(self) -> dict[str, Any]:
        """Statistics of the device and the compiled models; `kp_dynamo.cache_stats` has those of the programs.

        "device_memory" is what XLA reports, in bytes; None if the device reports none, as XLA's CPU device.
        """
        return {
            "device": str(self.device),
            "world_size": self.world_size,
            "rank": self.rank,
            "device_memory": xla.memory_info(),
            "model_cache_stats": self.compiler.get_compilation_stats()["compilation_cache"],
        }

    def clear_cache(self) -> None:
        """Drop all compiled models, programs and device copies of the process; what is in use is recompiled."""
        clear_cache()

    def save_model(
        self, model: nn.Module, path: Path, save_optimizer: bool = False, optimizer: Optimizer | None = None
    ) -> None:
        """`save_checkpoint` with this configuration; `save_optimizer=True` requires an optimizer.

        Raises:
            TPUCheckpointError: The file cannot be written, or the optimizer is missing.
        """
        _require_optimizer("save_optimizer", save_optimizer, optimizer)
        self.synchronize()
        save_checkpoint(path, checked_model(model), optimizer, config=self.config.to_dict())

    def load_model(
        self, model: nn.Module, path: Path, load_optimizer: bool = False, optimizer: Optimizer | None = None
    ) -> nn.Module:
        """`load_checkpoint` into `model`, which is returned; `load_optimizer=True` requires an optimizer.

        Raises:
            TPUCheckpointError: The file cannot be read or is damaged; model and optimizer are unchanged.
        """
        _require_optimizer("load_optimizer", load_optimizer, optimizer)
        load_checkpoint(path, checked_model(model), optimizer)
        return model


def _require_optimizer(name: str, is_wanted: bool, optimizer: object) -> None:
    if is_wanted and optimizer is None:
        raise TPUCheckpointError(
            f"{name}=True, but optimizer=None. Allowed: the torch.optim.Optimizer that trains the model. "
            f"Try: pass it, or omit {name}."
        )
