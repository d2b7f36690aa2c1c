"""`XLAOptimizations`: what a chip asks of a model, done where results stay the same to the bit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config, deciding_chip
from kp_dynamo.api.hints import add_hints, make_dynamic
from kp_dynamo.api.models import checked_model
from kp_dynamo.api.tiles import off_tile_sizes
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUOptimizationError


@dataclass(frozen=True)
class Change:
    """Something that a chip asks for, and whether it was done.

    Attributes:
        path: Of the module or parameter.
        what: What would be better.
        is_applied: Whether it was done.
        reason: Why not.
    """

    path: str
    what: str
    is_applied: bool
    reason: str = ""


class XLAOptimizations:
    """Makes models ready for a chip.

    Args:
        tpu_config: Decides about the chip.

    Raises:
        TPUConfigurationError: It is no TPUConfig.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        self._reports: WeakKeyDictionary[nn.Module, tuple[Change, ...]] = WeakKeyDictionary()

    def optimize_model_for_xla(self, model: nn.Module) -> nn.Module:
        """Do in place what changes no result, and note what would: `report` tells. Returns `model`.

        Done: parameters on the CPU that are views with strides or holes become contiguous (a transfer copies them as
        they lie). Refused: those of them that share their memory, which would no longer; padding layers to the chip's
        tiles, which changes their shapes, the state dict and the order of sums; dtypes that the chip computes in
        software, which change values. Dropout of probability 0 stays: its probability may be read, or raised later.

        Raises:
            TPUModelPreparationError: It is no module.
        """
        module = checked_model(model)
        self._reports[module] = (*_made_contiguous(module), *self._refused(module))
        return model

    def report(self, model: nn.Module) -> tuple[Change, ...]:
        """What `optimize_model_for_xla` did to `model`, and what it refused.

        Raises:
            TPUOptimizationError: It was not called for this model.
        """
        module = checked_model(model)
        if module not in self._reports:
            raise TPUOptimizationError("there is no report of this model; call optimize_model_for_xla(model) first")
        return self._reports[module]

    def add_compilation_hints(self, model: nn.Module, **options: Any) -> nn.Module:
        """Have `model` compiled with these options by `XLACompiler` and `TPUOptimizer`. Returns `model`.

        They win over the configuration's; the level that a call names wins over theirs. Without any, those that follow
        from the model: no checkpointing where nothing is trained.

        Raises:
            TPUConfigurationError: An option that there is not, or a bad value.
        """
        module = checked_model(model)
        is_trained = any(p.requires_grad for p in module.parameters())
        add_hints(module, options or ({} if is_trained else {"checkpoint": "off"}))
        return model

    def enable_dynamic_shapes(self, model: nn.Module) -> nn.Module:
        """Have `model` captured once for all shapes by `XLACompiler` and `TPUOptimizer`. Returns `model`.

        XLA compiles a program for each shape all the same; Dynamo and AOTAutograd are spared.

        Raises:
            TPUOptimizationError: The configuration says `enable_xla_dynamic_shapes=False`.
        """
        if not self.config.enable_xla_dynamic_shapes:
            raise TPUOptimizationError(
                "the configuration says enable_xla_dynamic_shapes=False; set it to True to compile for changing shapes"
            )
        make_dynamic(checked_model(model))
        return model

    def _refused(self, module: nn.Module) -> list[Change]:
        chip = deciding_chip(self.config)
        padded = [
            Change(path, f"pad to the tiles of a {chip.name} ({text}; it computes {ratio:.2f} times as much)", False,
                   "its parameters, the state dict and the order of sums would change; choose other sizes")
            for path, text, ratio in off_tile_sizes(module, chip)
        ]  # fmt: skip
        wide = [
            Change(name, "float64 is computed in software", False, "values would change; call model.float()")
            for name, p in module.named_parameters()
            if p.dtype == torch.float64
        ]
        return padded + wide


def _made_contiguous(module: nn.Module) -> list[Change]:
    changes, sharing = [], _names_by_storage(module)
    for name, parameter in module.named_parameters():
        if not _is_on_cpu(parameter) or parameter.is_contiguous():
            continue
        if others := [other for other in sharing[parameter.untyped_storage()._cdata] if other != name]:
            reason = f"it shares its memory with {', '.join(others)}, and would no longer"
            changes.append(Change(name, "lay out contiguously", False, reason))
            continue
        with torch.no_grad():
            parameter.set_(parameter.contiguous())  # type: ignore[call-overload]  # mypy takes it for a storage
        changes.append(Change(name, "lay out contiguously", True))
    return changes


def _names_by_storage(module: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if _is_on_cpu(tensor):
            found[tensor.untyped_storage()._cdata].append(name)
    return found


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    """Dense, with a storage of which something can be told."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
