"""The checked arguments of `aot_compile`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kp_dynamo.aot.slices import Slice, slice_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError, TPUModelPreparationError
from kp_dynamo.hardware import CHIPS, Spread, memory_budget_bytes
from kp_dynamo.sharding.mesh import DATA, MODEL

BACKENDS = ("kp_tpu", "openxla")
_OF_EVERY_BACKEND = ("target", "memory_fraction", "memory_budget_gb", "compile_timeout_s")


@dataclass(frozen=True)
class AotRequest:
    """What to compile, and how.

    Attributes:
        memory_budget_bytes: What a program may use of the memory of one device: a chip, or half a v7.
        slice: The chips to compile for; None for one device.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    target: str
    given: dict[str, Any]
    options: CompileOptions
    backend: str
    train: bool
    memory_budget_bytes: float
    slice: Slice | None = None

    @property
    def needs_device(self) -> bool:
        """Whether the model must be called on device tensors: torch_xla's own bridge cannot trace otherwise."""
        return self.backend == "openxla" or self.options.lowering == "stock"


@dataclass(frozen=True)
class Machine:
    """What to compile for: the arguments of `aot_compile` that are not about the model."""

    target: str
    chips: int | str | None = None
    mesh: Any = None
    sharding: Any = None


def request_of(model: Any, args: Any, machine: Machine, options: Any, backend: str, train: bool) -> AotRequest:
    """Check the arguments of `aot_compile`.

    Raises:
        TPUConfigurationError: An unknown target, option or backend, or a slice that is invalid.
        TPUModelPreparationError: The model is not callable, `args` is not a sequence, or a tensor has no shape yet.
    """
    target = machine.target
    require_target(target)
    if backend not in BACKENDS:
        raise TPUConfigurationError(f"backend={backend!r} is unknown. Allowed: {', '.join(BACKENDS)}.")
    if not callable(model):
        raise TPUModelPreparationError(
            f"model of type {type(model).__name__} is invalid: it is not callable. Allowed: a module or function."
        )
    if isinstance(args, torch.Tensor) or not isinstance(args, Sequence):
        raise TPUModelPreparationError(
            f"args of type {type(args).__name__} is invalid. Allowed: a tuple of arguments, such as (tokens,)."
        )
    given = CompileOptions.from_dict(options).given_values()
    _require_options_of(backend, given)
    if given.get("target", target) not in ("auto", target):
        raise TPUConfigurationError(
            f"target={target!r} conflicts with the option target={given['target']!r}. Try: set only one of them."
        )
    named = dict([*model.named_parameters(), *model.named_buffers()]) if isinstance(model, nn.Module) else {}
    given_tensors = {f"argument {i}": a for i, a in enumerate(torch.utils._pytree.tree_leaves(args))}
    require_shapes({**named, **given_tensors})
    checked = CompileOptions.from_dict({**given, "target": target})
    budget = memory_budget_bytes(checked.chip, checked.memory_fraction, checked.memory_budget_gb)
    found = slice_of(target, machine.chips, machine.mesh, machine.sharding)
    if found is not None:
        _require_our_lowering(backend, checked)
        checked = checked.over(Spread(found.topology.num_devices, found.mesh.count(DATA), found.mesh.count(MODEL)))
    return AotRequest(model, tuple(args), target, given, checked, backend, train, budget, found)


def _require_our_lowering(backend: str, options: CompileOptions) -> None:
    if backend != "kp_tpu" or options.lowering == "stock":
        name, value = ("backend", backend) if backend != "kp_tpu" else ("lowering", options.lowering)
        raise TPUConfigurationError(
            f"{name}={value!r} is unsupported for several chips. Allowed: backend='kp_tpu' with lowering='openxla'. "
            "Try: chips=None for the comparison."
        )


def _require_options_of(backend: str, given: dict[str, Any]) -> None:
    ours = [name for name in given if name not in _OF_EVERY_BACKEND]
    if backend == "openxla" and ours:
        raise TPUConfigurationError(
            f"backend='openxla' has no option {ours[0]!r}. Allowed: {', '.join(_OF_EVERY_BACKEND)}. "
            "Try: backend='kp_tpu'."
        )


def require_shapes(named: Mapping[str, Any]) -> None:
    """Raise a TPUModelPreparationError if one of these is a lazy tensor, which has no shape yet."""
    for name, tensor in named.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise TPUModelPreparationError(
                f"{name} has no shape yet: a lazy module gets it from its first input. Try: call the model once first."
            )


def require_target(target: str) -> None:
    if target not in CHIPS:
        nearest = difflib.get_close_matches(str(target), CHIPS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise TPUConfigurationError(f"target={target!r} is unknown{hint} Allowed: {', '.join(CHIPS)}.")
