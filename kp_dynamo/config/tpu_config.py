"""The configuration of the object API.

Each field is defined once, checked on every assignment, and documented below it. `config/translation.py` maps the
fields to the arguments of `torch.compile`.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from kp_dynamo.config import rules
from kp_dynamo.config.checked_fields import Checked, checked_field, known_keys, member_of, required_mapping, xla_flags
from kp_dynamo.exceptions import TPUConfigurationError

Mode = Literal["inference", "training", "development"]

FORMAT = 1
"""Version of the dict that `KernelPyTorchConfig.to_dict` returns. A dict without a version is older and accepted."""


class TPUVersion(enum.Enum):
    """TPU generation. AUTO: the chip that is present, else v5e."""

    AUTO = "auto"
    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    V7 = "v7"


class TPUTopology(enum.Enum):
    """Number of chips. SINGLE: one. AUTO: one, or all under SPMD. POD: all of one slice. SUPERPOD: several slices."""

    AUTO = "auto"
    SINGLE = "single"
    POD = "pod"
    SUPERPOD = "superpod"


class TPUCompilationMode(enum.Enum):
    """How a model is compiled.

    TORCH_XLA: one program per graph that Dynamo captures; graph breaks are allowed.
    XLA: the whole model as one graph; a graph break raises. Resets Dynamo.
    PJIT: unsupported; compiling raises.
    """

    XLA = "xla"
    PJIT = "pjit"
    TORCH_XLA = "torch_xla"


@dataclass(kw_only=True)
class TPUConfig(Checked):
    """TPU settings.

    Raises:
        TPUConfigurationError: An unknown field or a bad value, at construction or on assignment.
    """

    enabled: bool = checked_field(True, rules.boolean())
    """False: every use of the device raises TPUNotAvailableError."""

    version: TPUVersion = checked_field(TPUVersion.AUTO, member_of(TPUVersion))
    """The chip to compile for; it sets memory and tiles. If set explicitly, graphs that do not fit are refused."""

    topology: TPUTopology = checked_field(TPUTopology.AUTO, member_of(TPUTopology))
    """POD: programs run on all devices of the process (SPMD). SINGLE: on one. AUTO: on one, or on all if
    `torch_xla.runtime.use_spmd()` was called. SUPERPOD raises TPUDistributedError: it is not yet supported."""

    compilation_mode: TPUCompilationMode = checked_field(TPUCompilationMode.TORCH_XLA, member_of(TPUCompilationMode))
    """See `TPUCompilationMode`."""

    xla_flags: str | None = checked_field(None, rules.nothing() | xla_flags())
    """Compiler flags, set when the device is first used; after it has started, new flags raise. Flags that start with
    `--xla_tpu` or `--xla_jf` go into LIBTPU_INIT_ARGS, others into XLA_FLAGS."""

    precision: Literal["bfloat16", "float32"] = checked_field("bfloat16", rules.one_of("bfloat16", "float32"))
    """Compute dtype of the ops that the level casts."""

    mixed_precision: bool = checked_field(True, rules.boolean())
    """False: no casts; the model computes in its own dtypes."""

    memory_fraction: float = checked_field(0.90, rules.number(above=0, maximum=1))
    """Share of the chip's memory that a program may use."""

    gradient_checkpointing: bool = checked_field(True, rules.boolean())
    """False: recompute only what costs nothing. True: as the level sets it; from "balanced" on, enough to fit."""

    xla_optimization_level: int = checked_field(2, rules.integer(0, 2))
    """0, 1, 2: the level "conservative", "balanced", "aggressive" if a call does not set one."""

    enable_xla_dynamic_shapes: bool = checked_field(True, rules.boolean())
    """True: a varying length is captured once for all lengths and padded to powers of two. False: every shape is
    captured separately."""

    cache_max_size: int = checked_field(100, rules.integer(1))
    """Maximum number of compiled models per compiler and of programs per process; the least recently used are evicted
    first."""

    compilation_timeout_seconds: float | None = checked_field(300.0, rules.number(above=0) | rules.nothing())
    """Soft time budget of one compilation, see docs/guide.md. None: no budget."""

    allocation_history_retention_seconds: float = checked_field(3600.0, rules.number(above=0))
    """How long the memory manager keeps an allocation in its history."""

    v6e_memory_gb: float | None = checked_field(None, rules.number(above=0) | rules.nothing())
    """Memory of a v6e in GB (1e9 bytes), if it differs from the 32 of `hardware.py`. No effect on other chips."""

    v7_memory_gb: float | None = checked_field(None, rules.number(above=0) | rules.nothing())
    """Memory of a v7 in GB, if it differs from the vendor's 192 GiB. No effect on other chips."""

    enable_strict_validation: bool = checked_field(False, rules.boolean())
    """Validation warnings raise TPUValidationError, and graphs are compiled with `strict`."""

    monitoring_interval_seconds: float = checked_field(1.0, rules.number(above=0))
    """Default interval between two samples of `monitor_memory`."""

    monitoring_duration_seconds: float = checked_field(60.0, rules.number(above=0))
    """Default duration of `monitor_memory`."""


@dataclass(kw_only=True)
class HardwareConfig(Checked):
    """Hardware settings; TPUs are the only kind."""

    tpu: TPUConfig = checked_field(None, rules.Rule("a TPUConfig", lambda value: _tpu_config(value)))

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        return {"tpu": self.tpu.to_dict()}


def _tpu_config(value: object) -> TPUConfig:
    if value is None:
        return TPUConfig()
    if isinstance(value, dict):
        return TPUConfig.from_dict(value)
    if not isinstance(value, TPUConfig):
        raise ValueError
    return value


class KernelPyTorchConfig:
    """The top-level configuration: `config.hardware.tpu` holds the fields.

    Args:
        mode: A preset. "inference": no gradient checkpointing. "training": checkpointing, mixed precision, level 2.
            "development": strict validation, level 0. None: the defaults.
        hardware: Initial fields, instead of a preset.

    Raises:
        TPUConfigurationError: An unknown mode, or both `mode` and `hardware`; on assignment, an unknown attribute or
            a bad value.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "inference": {"gradient_checkpointing": False},
        "training": {"gradient_checkpointing": True, "mixed_precision": True, "xla_optimization_level": 2},
        "development": {"enable_strict_validation": True, "xla_optimization_level": 0},
    }

    def __init__(self, mode: Mode | None = None, *, hardware: HardwareConfig | None = None) -> None:
        self.mode = mode
        if mode is not None and hardware is not None:
            raise TPUConfigurationError(
                f"both mode={mode!r} and hardware are given. Allowed: one of them. Try: set fields after construction."
            )
        if hardware is None:
            hardware = HardwareConfig(tpu=TPUConfig(**self.PRESETS.get(mode or "", {})))
        self.hardware = hardware

    def __setattr__(self, name: str, value: object) -> None:
        known_keys(type(self).__name__, [name], ("mode", "hardware"))
        if name == "mode" and value is not None and value not in get_args(Mode):
            raise TPUConfigurationError(
                f"mode={rules.short(value)} is invalid. Allowed: {', '.join(self.PRESETS)}, None."
            )
        if name == "hardware" and not isinstance(value, HardwareConfig):
            raise TPUConfigurationError(f"hardware={rules.short(value)} is invalid. Allowed: a HardwareConfig.")
        super().__setattr__(name, value)

    @classmethod
    def for_inference(cls) -> KernelPyTorchConfig:
        """The preset "inference"."""
        return cls("inference")

    @classmethod
    def for_training(cls) -> KernelPyTorchConfig:
        """The preset "training"."""
        return cls("training")

    @classmethod
    def for_development(cls) -> KernelPyTorchConfig:
        """The preset "development"."""
        return cls("development")

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        return {"format": FORMAT, "mode": self.mode, "hardware": self.hardware.to_dict()}

    @classmethod
    def from_dict(cls, values: object) -> KernelPyTorchConfig:
        """The inverse of `to_dict`. Missing keys, as in older files, get the mode's values.

        Raises:
            TPUConfigurationError: An unknown key, a bad value, or a format newer than this version.
        """
        given = required_mapping(cls.__name__, values)
        known_keys(cls.__name__, given, ("format", "mode", "hardware"))
        if given.get("format", FORMAT) not in range(1, FORMAT + 1):
            raise TPUConfigurationError(
                f"format={rules.short(given['format'])} of the configuration is invalid: this version reads formats "
                f"up to {FORMAT}. Try: the version of kp_tpu that wrote it."
            )
        config = cls(given.get("mode"))
        hardware = required_mapping("hardware", given.get("hardware", {}))
        known_keys("hardware", hardware, ("tpu",))
        tpu = required_mapping("hardware.tpu", hardware.get("tpu", {}))
        config.hardware.tpu = TPUConfig.from_dict({**config.hardware.tpu.to_dict(), **tpu})
        return config

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> KernelPyTorchConfig:
        """The inverse of `to_json`.

        Raises:
            TPUConfigurationError: The text is not JSON, or not a configuration.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as problem:
            raise TPUConfigurationError(
                f"the configuration is not JSON: {problem}. Allowed: what to_json() returned."
            ) from None
        return cls.from_dict(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelPyTorchConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"KernelPyTorchConfig.from_dict({self.to_dict()})"
