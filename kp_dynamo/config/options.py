"""The options of `torch.compile(model, backend="kp_tpu", options={...})`, each written down once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_args

from kp_dynamo.config import rules
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.hardware import CHIPS, Chip

Level = Literal["conservative", "balanced", "aggressive"]
Precision = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["default", "high", "highest"]
CastScope = Literal["linear", "matmul", "all"]
Target = Literal["auto", "v4", "v5e", "v5p", "v6e", "v7"]
LoweringName = Literal["openxla", "stock"]

_MATMUL_PRECISION_OF_TORCH: dict[str, MatmulPrecision] = {"highest": "highest", "high": "high", "medium": "default"}


@dataclass(frozen=True)
class LevelPreset:
    """What a level stands for; every key the user writes wins over it."""

    cast_scope: CastScope
    fuse: bool
    checkpoint: str


LEVELS: dict[Level, LevelPreset] = {
    "conservative": LevelPreset(cast_scope="linear", fuse=False, checkpoint="off"),
    "balanced": LevelPreset(cast_scope="matmul", fuse=True, checkpoint="auto"),
    "aggressive": LevelPreset(cast_scope="all", fuse=True, checkpoint="auto"),
}


def _option(
    default: Any,
    rule: rules.Rule,
    *,
    not_in_key: str | None = None,
) -> Any:
    """A field of `CompileOptions` with all that is known about it.

    Args:
        default: Its value when neither the user nor the level says anything.
        rule: What it may be.
        not_in_key: Why two values of it give the same compiled program; None where they may not.
    """
    return field(default=default, metadata={"rule": rule, "not_in_key": not_in_key})


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Validated options. What is left out comes from the level, or is the default named here.

    Raises:
        TPUConfigurationError: An unknown key or a bad value.
    """

    given: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names of the keys the user set; the level decides about the others."""

    level: Level = _option("balanced", rules.one_of(*get_args(Level)))
    """Preset. Decides what `cast_bf16` may cast (`cast_scope`) and the defaults of `fuse` and `checkpoint`.
    Balanced, because the matmul family is where bfloat16 pays and is safe."""

    precision: Precision = _option("bfloat16", rules.one_of(*get_args(Precision)))
    """Compute dtype of what may be cast; bfloat16 at every level, the dtype of the MXU. "float32" takes
    every cast out."""

    matmul_precision: MatmulPrecision | None = _option(None, rules.one_of(*get_args(MatmulPrecision)) | rules.nothing())
    """Passes over the MXU for float32 products: one, three ("high") or six ("highest"). None follows
    `torch.get_float32_matmul_precision()` at compile time, see `resolve_matmul_precision`."""

    keep_float32: tuple[str, ...] = _option((), rules.names("ATen op names or module-path globs"))
    """Ops ("aten.mm") and modules ("model.layers.*.mlp") that are never cast. Empty: the built-in table of
    sensitive ops holds at every level anyway."""

    fuse: bool = _option(None, rules.boolean())
    """Linear+activation fusion, one rounding instead of two, and attention as one operator. By level, off at
    conservative only."""

    checkpoint: str | float = _option(
        None, rules.one_of("off", "attention", "blocks", "auto") | rules.number(minimum=0, maximum=1)
    )
    """Gradient checkpointing; a number is the share of activation bytes to keep. By level: "off" at conservative, else
    "auto", and attention scores are then computed again even where there is room: the TPU's compiler is faster so."""

    buckets: Literal["pow2"] | tuple[int, ...] | Mapping[str, int] | None = _option(
        None, rules.one_of("pow2") | rules.buckets() | rules.nothing()
    )
    """Lengths that dynamic dimensions are padded to, so that one program serves many. "pow2": the next power of two.
    None compiles every length exactly."""

    over_bucket: Literal["error", "exact"] = _option("exact", rules.one_of("error", "exact"))
    """What a length over the last bucket does. "exact" compiles it as it is: slow, but right."""

    memory_fraction: float = _option(0.90, rules.number(above=0, maximum=1))
    """Share of the chip's memory that a program may fill; the rest is for what runs beside it. Where this,
    `memory_budget_gb` or `target` is given, a graph whose arguments and results alone are more is refused at once."""

    memory_budget_gb: float | None = _option(None, rules.number(above=0) | rules.nothing())
    """Gigabytes (1e9 bytes) that overrule chip memory x `memory_fraction`."""

    optimizer_state_factor: float = _option(2.0, rules.number(minimum=0))
    """Bytes of optimizer state per parameter byte, for `checkpoint="auto"`: two moments, as of AdamW."""

    disable_passes: tuple[str, ...] = _option((), rules.names("pass names"))
    """Passes taken out of the pipeline, which knows the names and refuses others."""

    extra_passes: tuple[Any, ...] = _option((), rules.graph_passes())
    """`GraphPass` objects that run after ours; their `repr` enters the key. Any, because options are below passes."""

    donate: Literal["off", "mutated"] = _option("off", rules.one_of("off", "mutated"))
    """Whether buffers of inputs that the graph overwrites are reused for its outputs. Off, because a program that fails
    while it runs then leaves nothing of them, and what holds a buffer in ways torch does not know of loses it."""

    target: Target = _option("auto", rules.one_of(*get_args(Target)))
    """The chip whose memory decides. "auto": the one of this machine, and v5e, the cheapest to rent, where there is
    none."""

    cache_size: int = _option(
        100, rules.integer(1), not_in_key="it says how many programs are kept, not what is in them"
    )
    """Compiled graphs kept in the process, least recently used go first. 100 holds the forward and backward graphs
    of any one model; a program's host memory is some megabytes."""

    compile_timeout_s: float | None = _option(
        300.0,
        rules.number(above=0) | rules.nothing(),
        not_in_key="it says how long compiling may take, not what is compiled",
    )
    """Soft budget of one compilation in seconds: a warning when it is over, an error when the compilation has ended,
    since XLA cannot be interrupted. None: no budget."""

    lowering: LoweringName = _option("openxla", rules.one_of(*get_args(LoweringName)))
    """Our bridge onto XLA, or torch_xla's own ("stock"): silently wrong in known cases, there to compare."""

    strict: bool = _option(False, rules.boolean())
    """Refusals, CPU fallbacks and graph surprises raise instead of warning. In the key: a program compiled without
    it may hold what it forbids."""

    dump_dir: Path | None = _option(
        None, rules.folder() | rules.nothing(), not_in_key="it says where graphs are written, not what is in them"
    )
    """Folder for graphs before and after each pass, keys and reports; made, or refused, when first written to."""

    def __new__(cls, **given: object) -> Self:
        """Sees the keys before the generated `__init__` does, which would call an unknown one a TypeError."""
        for key in given:
            _require_known(key)
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(given))
        return self

    def __post_init__(self) -> None:
        by_name = {f.name: f for f in option_fields()}
        self._store("level", _accepted(by_name["level"], self.level))
        for name, option in by_name.items():
            chosen = getattr(self, name) if name in self.given else self._unset(option)
            self._store(name, _accepted(option, chosen))

    @classmethod
    def from_dict(cls, options: object) -> CompileOptions:
        """Options as torch hands them to a backend: a dict, or None where the user gave none."""
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise TPUConfigurationError(
                f"options must be a dict such as {{'level': 'balanced'}}, not {rules.short(options)} "
                f"({type(options).__name__}); write torch.compile(model, backend='kp_tpu', options={{...}})"
            )
        for key in options:
            _require_known(key)
        return cls(**options)

    def given_values(self) -> dict[str, object]:
        """The keys that the user set, with their values."""
        return {f.name: getattr(self, f.name) for f in option_fields() if f.name in self.given}

    def on(self, present: str | None) -> CompileOptions:
        """These options on a machine with the chip `present`, None where it has none: it is what "auto" stands for."""
        if present is None or self.target != "auto":
            return self
        return CompileOptions.from_dict({**self.given_values(), "target": present})

    @property
    def chip(self) -> Chip:
        """The chip that `target` stands for, where no chip is present."""
        return CHIPS["v5e" if self.target == "auto" else self.target]

    @property
    def is_memory_bounded(self) -> bool:
        """Whether the user has said what memory there is."""
        return bool(self.given & {"target", "memory_fraction", "memory_budget_gb"})

    @property
    def cast_scope(self) -> CastScope:
        """What `cast_bf16` may cast: Linear layers, the matmul family, or all but the sensitive ops."""
        return LEVELS[self.level].cast_scope

    def key(self) -> str:
        """Stable text of every option that may change the compiled program, one `name=value` a line.

        What `matmul_precision=None` follows is torch's setting, which the compile key holds beside this text.
        """
        in_key = (f.name for f in option_fields() if f.metadata["not_in_key"] is None)
        return "\n".join(f"{name}={getattr(self, name)!r}" for name in in_key)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen is for the users of this class, not for its construction

    def _unset(self, option: Field[Any]) -> object:
        """The value of a key the user left out: the level's if it has one, else the default."""
        return getattr(LEVELS[self.level], option.name, option.default)


def option_fields() -> list[Field[Any]]:
    """The fields that are options, in the order of the documentation."""
    return [f for f in fields(CompileOptions) if f.init]


def ignored_in_key() -> dict[str, str]:
    """Options that `CompileOptions.key` leaves out, each with the reason."""
    return {f.name: f.metadata["not_in_key"] for f in option_fields() if f.metadata["not_in_key"]}


def resolve_matmul_precision(chosen: MatmulPrecision | None, torch_setting: str) -> MatmulPrecision:
    """The precision of float32 products, from the option and `torch.get_float32_matmul_precision()`.

    torch's "medium" (one bfloat16 pass) is XLA's "default"; the other words mean the same in both.
    """
    if chosen is not None:
        return chosen
    if torch_setting not in _MATMUL_PRECISION_OF_TORCH:
        raise TPUConfigurationError(
            f"torch's float32 matmul precision is {torch_setting!r}; known: {', '.join(_MATMUL_PRECISION_OF_TORCH)}; "
            "set the option 'matmul_precision' to 'default', 'high' or 'highest'"
        )
    return _MATMUL_PRECISION_OF_TORCH[torch_setting]


def _require_known(key: object) -> None:
    known = [f.name for f in option_fields()]
    if isinstance(key, str) and key in known:
        return
    nearest = difflib.get_close_matches(str(key), known, n=1) if isinstance(key, str) else []
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise TPUConfigurationError(f"option {rules.short(key)} is not known; {hint}known options: {', '.join(known)}")


def _accepted(option: Field[Any], value: object) -> object:
    """The value in its normal form; raises where it is not allowed."""
    rule: rules.Rule = option.metadata["rule"]
    try:
        normal = rule.normalise(value)
    except ValueError as reason:
        because = f" ({reason})" if str(reason) else ""
        raise TPUConfigurationError(
            f"option {option.name!r} is {rules.short(value)}{because}; allowed: {rule.allowed}; "
            "correct it, or leave the key out for its default"
        ) from None
    return normal
