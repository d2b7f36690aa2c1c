"""The configuration of the object API: what is asked of a TPU, field by field.

Each field is written down once, checked whenever it is set, and has the effect that stands under it; what it means
for `torch.compile` is in `config/translation.py`.
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
"""Of the dict that `KernelPyTorchConfig.to_dict` gives. One without a number is older, and read."""


class TPUVersion(enum.Enum):
    """Generation of TPU. AUTO: the chip that is present, else v5e."""

    AUTO = "auto"
    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    V7 = "v7"


class TPUTopology(enum.Enum):
    """How many chips take part. AUTO is SINGLE; POD is several of one slice; SUPERPOD several slices."""

    AUTO = "auto"
    SINGLE = "single"
    POD = "pod"
    SUPERPOD = "superpod"


class TPUCompilationMode(enum.Enum):
    """How a model becomes programs.

    TORCH_XLA: a program for each graph that Dynamo captures; what it cannot capture runs in Python between them.
    XLA: the whole model as one graph, and an error where Dynamo has to end it. Resets Dynamo.
    PJIT: through JAX; there is no such way, and compiling raises.
    """

    XLA = "xla"
    PJIT = "pjit"
    TORCH_XLA = "torch_xla"


@dataclass(kw_only=True)
class TPUConfig(Checked):
    """What is asked of a TPU.

    Raises:
        TPUConfigurationError: An unknown field or a bad value, at construction or when one is set.
    """

    enabled: bool = checked_field(True, rules.boolean())
    """False: whatever would use the device raises TPUNotAvailableError."""

    version: TPUVersion = checked_field(TPUVersion.AUTO, member_of(TPUVersion))
    """The chip whose memory and tiles decide. One that is named is compiled for: what does not fit it is refused."""

    topology: TPUTopology = checked_field(TPUTopology.AUTO, member_of(TPUTopology))
    """POD: programs run over all devices of the process (SPMD); SINGLE: over one; AUTO: over one, or over all where
    `torch_xla.runtime.use_spmd()` has been called. SUPERPOD raises TPUDistributedError: it is not there yet."""

    compilation_mode: TPUCompilationMode = checked_field(TPUCompilationMode.TORCH_XLA, member_of(TPUCompilationMode))
    """See `TPUCompilationMode`."""

    xla_flags: str | None = checked_field(None, rules.nothing() | xla_flags())
    """Flags of the compiler, set when the device is first used; once it has started, new ones raise. Those that
    begin with `--xla_tpu` go into LIBTPU_INIT_ARGS, others into XLA_FLAGS."""

    precision: Literal["bfloat16", "float32"] = checked_field("bfloat16", rules.one_of("bfloat16", "float32"))
    """Compute dtype of what the level casts."""

    mixed_precision: bool = checked_field(True, rules.boolean())
    """False: nothing is cast; everything is computed in the dtype that the model has."""

    memory_fraction: float = checked_field(0.90, rules.number(above=0, maximum=1))
    """Share of the chip's memory that a program may use."""

    gradient_checkpointing: bool = checked_field(True, rules.boolean())
    """True: as the level says, which from "balanced" on is as much as fitting takes. False: never."""

    xla_optimization_level: int = checked_field(2, rules.integer(0, 2))
    """0, 1, 2: the level "conservative", "balanced", "aggressive" where a call names none."""

    enable_xla_dynamic_shapes: bool = checked_field(True, rules.boolean())
    """True: a length that changes is captured once for all lengths, and padded to powers of two. False: every shape
    is captured on its own."""

    cache_max_size: int = checked_field(100, rules.integer(1))
    """Compiled models that a compiler keeps, and programs that the process keeps; least recently used go first."""

    compilation_timeout_seconds: float | None = checked_field(300.0, rules.number(above=0) | rules.nothing())
    """Soft budget of one compilation, see docs/guide.md. None: no budget."""

    allocation_history_retention_seconds: float = checked_field(3600.0, rules.number(above=0))
    """How long the memory manager remembers an allocation."""

    v6e_memory_gb: float | None = checked_field(None, rules.number(above=0) | rules.nothing())
    """Memory of a v6e, in GB (1e9 bytes), where it is not the 32 of `hardware.py`. Without effect on other chips."""

    v7_memory_gb: float | None = checked_field(None, rules.number(above=0) | rules.nothing())
    """Memory of a v7, likewise, where it is not the vendor's 192 GiB."""

    enable_strict_validation: bool = checked_field(False, rules.boolean())
    """Warnings of validation raise TPUValidationError, and graphs are compiled with `strict`."""

    monitoring_interval_seconds: float = checked_field(1.0, rules.number(above=0))
    """Time between two looks at the memory, where `monitor_memory` is not told."""

    monitoring_duration_seconds: float = checked_field(60.0, rules.number(above=0))
    """How long `monitor_memory` looks, where it is not told."""


@dataclass(kw_only=True)
class HardwareConfig(Checked):
    """What is asked of the hardware: one kind of it."""

    tpu: TPUConfig = checked_field(None, rules.Rule("a TPUConfig", lambda value: _tpu_config(value)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
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
    """The configuration as a whole: `config.hardware.tpu` holds the fields.

    Args:
        mode: A preset. "inference": no gradient checkpointing. "training": checkpointing, mixed precision, level 2.
            "development": strict validation, level 0. None: the defaults.
        hardware: Fields to start from, instead of a preset.

    Raises:
        TPUConfigurationError: An unknown mode, or both a mode's preset and fields; later, an unknown attribute or a bad
            value when it is set.
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
                f"both mode={mode!r} and hardware are given; allowed: one of them. Set fields of the preset afterwards."
            )
        if hardware is None:
            hardware = HardwareConfig(tpu=TPUConfig(**self.PRESETS.get(mode or "", {})))
        self.hardware = hardware

    def __setattr__(self, name: str, value: object) -> None:
        known_keys(type(self).__name__, [name], ("mode", "hardware"))
        if name == "mode" and value is not None and value not in get_args(Mode):
            raise TPUConfigurationError(f"mode is {rules.short(value)}; allowed: {', '.join(self.PRESETS)}, None")
        if name == "hardware" and not isinstance(value, HardwareConfig):
            raise TPUConfigurationError(f"hardware is {rules.short(value)}; allowed: a HardwareConfig")
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
        """Plain values, fit for JSON."""
        return {"format": FORMAT, "mode": self.mode, "hardware": self.hardware.to_dict()}

    @classmethod
    def from_dict(cls, values: object) -> KernelPyTorchConfig:
        """The opposite of `to_dict`. What is left out, as older files do, has the mode's value.

        Raises:
            TPUConfigurationError: An unknown key, a bad value, or a format that is newer than this version.
        """
        given = required_mapping(cls.__name__, values)
        known_keys(cls.__name__, given, ("format", "mode", "hardware"))
        if given.get("format", FORMAT) not in range(1, FORMAT + 1):
            raise TPUConfigurationError(
                f"the configuration has format {rules.short(given['format'])}; this version reads up to {FORMAT}; "
                "use the version of kp_tpu that wrote it"
            )
        config = cls(given.get("mode"))
        hardware = required_mapping("hardware", given.get("hardware", {}))
        known_keys("hardware", hardware, ("tpu",))
        tpu = required_mapping("hardware.tpu", hardware.get("tpu", {}))
        config.hardware.tpu = TPUConfig.from_dict({**config.hardware.tpu.to_dict(), **tpu})
        return config

    def to_json(self) -> str:
        """The configuration as a text of JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> KernelPyTorchConfig:
        """The opposite of `to_json`.

        Raises:
            TPUConfigurationError: It is no JSON, or not of a configuration.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as problem:
            raise TPUConfigurationError(f"the configuration is no JSON: {problem}; give what to_json() wrote") from None
        return cls.from_dict(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelPyTorchConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"KernelPyTorchConfig.from_dict({self.to_dict()})"
